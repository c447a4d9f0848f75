"""A CustomResourceDefinition as the API server applies it, made strict: unknown fields are errors, not dropped."""

import json
import os
import re
from collections.abc import Callable, Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

KUBERNETES = "v1.34.0-local-strict"
TYPE = (
    "x-kubernetes-type"  # our own word: in place of a type of Kubernetes itself, spelled out in the originals
)


class Mistake(ValueError):
    """What the API server would refuse, or drop without a word."""


def definition(name: str) -> dict[str, Any]:
    """That of `trainjob` or `jobset`: from SHARDWISE_CRDS, a folder of originals, else what is kept here."""
    folder = Path(os.environ.get("SHARDWISE_CRDS") or Path(__file__).with_name("schemas"))
    found = [path for path in sorted(folder.glob("*.yaml")) if name in path.name]
    if not found:
        raise FileNotFoundError(f"no file *{name}*.yaml in {folder}")
    crd: dict[str, Any] = YAML(typ="safe").load(found[0].read_text())
    return crd


def schema_of(crd: Mapping[str, Any]) -> Any:
    """As the definition has it, of the version that is stored."""
    version = next(one for one in crd["spec"]["versions"] if one["served"] and one["storage"])
    return version["schema"]["openAPIV3Schema"]


def check(name: str, manifest: dict[str, Any]) -> None:
    """Raise Mistake for the first thing that is wrong."""
    import jsonschema

    crd = definition(name)
    group, kind = crd["spec"]["group"], crd["spec"]["names"]["kind"]
    served = [f"{group}/{one['name']}" for one in crd["spec"]["versions"] if one["served"]]
    if manifest.get("apiVersion") not in served or manifest.get("kind") != kind:
        raise Mistake(f"{manifest.get('apiVersion')} {manifest.get('kind')} is not {kind} of {served}")
    schema = {**_strict(schema_of(crd)), "$defs": _types_of_kubernetes()}
    try:
        jsonschema.Draft202012Validator(schema).validate(manifest)
    except jsonschema.ValidationError as problem:
        raise Mistake(f"{problem.json_path}: {problem.message}") from None
    _unique_keys(schema, manifest, "$", schema["$defs"])
    _rules(schema, manifest, "$")


@cache
def _types_of_kubernetes() -> dict[str, Any]:
    path = files("kubernetes_validate") / "kubernetes-json-schema" / KUBERNETES / "_definitions.json"
    found: dict[str, Any] = json.loads(path.read_text())["$defs"]
    return found


def _strict(schema: Any) -> Any:
    """As JSON Schema: no unknown field, and integers within their format."""
    if isinstance(schema, list):
        return [_strict(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    rules = {key: schema[key] for key in ("x-kubernetes-validations",) if key in schema}
    if isinstance(schema.get(TYPE), str):
        return {"$ref": f"#/$defs/{schema[TYPE]}", **rules}
    found = {key: _strict(value) for key, value in schema.items()}
    if schema.get("x-kubernetes-int-or-string") is True:
        found["type"] = ["integer", "string"]  # a pattern counts for strings only, as there
    if schema.get("type") == "integer" and schema.get("format") == "int32":
        found = {"minimum": -(2**31), "maximum": 2**31 - 1, **found}
    if isinstance(schema.get("properties"), dict) and not schema.get("x-kubernetes-preserve-unknown-fields"):
        found.setdefault("additionalProperties", False)
    return found


def _unique_keys(schema: Any, value: Any, place: str, definitions: dict[str, Any]) -> None:
    """Lists that the API server keeps as maps: two entries with one key are refused. JSON Schema cannot say it."""
    if not isinstance(schema, dict):
        return
    if "$ref" in schema:
        schema = definitions[schema["$ref"].removeprefix("#/$defs/")]
    if isinstance(value, dict):
        for key, inner in value.items():
            _unique_keys(schema.get("properties", {}).get(key), inner, f"{place}.{key}", definitions)
    if isinstance(value, list):
        keys = schema.get("x-kubernetes-list-map-keys")
        if keys and schema.get("x-kubernetes-list-type") == "map":
            named = [tuple(item.get(key) for key in keys) for item in value]
            twice = [one for one in named if named.count(one) > 1]
            if twice:
                raise Mistake(f"{place}: {twice[0]} is there twice")
        for number, inner in enumerate(value):
            _unique_keys(schema.get("items"), inner, f"{place}[{number}]", definitions)


def _rules(schema: Any, value: Any, place: str) -> None:
    """x-kubernetes-validations: rules in CEL. Those that look at the object before a change do not count here."""
    if not isinstance(schema, dict):
        return
    for rule in schema.get("x-kubernetes-validations", []):
        text = " ".join(rule["rule"].split())
        if "oldSelf" not in text and not _holds(text, value):
            raise Mistake(f"{place}: {rule['message']}")
    if isinstance(value, dict):
        for key, inner in value.items():
            _rules(schema.get("properties", {}).get(key), inner, f"{place}.{key}")
    if isinstance(value, list):
        for number, inner in enumerate(value):
            _rules(schema.get("items"), inner, f"{place}[{number}]")


def _holds(rule: str, value: Any) -> bool:
    """The few forms of CEL that these definitions use. Raises NotImplementedError for another one."""
    for form, holds in FORMS:
        if found := form.fullmatch(rule):
            return holds(value, *found.groups())
    raise NotImplementedError(f"crd.py does not know the rule: {rule}")


def _at(value: Any, path: str) -> Any:
    """What stands at `self.a.b`; None where there is nothing."""
    for key in path.split(".")[1:]:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _in_order_and_depends(value: Any) -> bool:
    in_order = _at(value, "self.startupPolicy.startupPolicyOrder") == "InOrder"
    return in_order and any("dependsOn" in job for job in value.get("replicatedJobs", []))


FORMS: tuple[tuple[re.Pattern[str], Callable[..., bool]], ...] = (
    (re.compile(r"(self[\w.]*)\.matches\('(.*)'\)"),
     lambda value, path, pattern: bool(re.search(pattern, str(_at(value, path))))),
    (re.compile(r"size\((self[\w.]*)\) <= (\d+)"),
     lambda value, path, most: len(_at(value, path) or "") <= int(most)),
    (re.compile(r"(self[\w.]*) in \[(.*)\]"),
     lambda value, path, names: _at(value, path) in re.findall(r"'([^']*)'", names)),
    (re.compile(re.escape("!(has(self.startupPolicy) && self.startupPolicy.startupPolicyOrder == 'InOrder' && "
                          "self.replicatedJobs.exists(x, has(x.dependsOn)))")),
     lambda value: not _in_order_and_depends(value)),
    (re.compile(re.escape("self.templates.all(t, !has(t.metadata.namespace) || size(t.metadata.namespace) == 0)")),
     lambda value: not any(_at(t, "self.metadata.namespace") for t in value.get("templates", []))),
)  # fmt: skip
