"""A CustomResourceDefinition as the API server applies it, made strict: unknown fields are errors, not dropped."""

import json
import os
from importlib.resources import files
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

KUBERNETES = "v1.34.0-local-strict"


class Mistake(ValueError):
    """What the API server would refuse, or drop without a word."""


def strict_schema(name: str) -> dict[str, Any]:
    """JSON Schema of `trainjob` or `jobset`: from SHARDWISE_CRDS, a folder of originals, else what is kept here."""
    folder = Path(os.environ.get("SHARDWISE_CRDS") or Path(__file__).with_name("schemas"))
    path = next(path for path in sorted(folder.glob("*.yaml")) if name in path.name)
    crd = YAML(typ="safe").load(path.read_text())
    schema = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    definitions = files("kubernetes_validate") / "kubernetes-json-schema" / KUBERNETES / "_definitions.json"
    return {**_strict(schema), "$defs": json.loads(definitions.read_text())["$defs"]}


def _strict(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_strict(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    if "x-kubernetes-type" in schema:
        return {"$ref": f"#/$defs/{schema['x-kubernetes-type']}"}
    if schema.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    found = {key: _strict(value) for key, value in schema.items()}
    if isinstance(schema.get("properties"), dict) and not schema.get("x-kubernetes-preserve-unknown-fields"):
        found.setdefault("additionalProperties", False)
    return found


def check(name: str, manifest: dict[str, Any]) -> None:
    """Raise Mistake for the first thing that is wrong."""
    import jsonschema

    schema = strict_schema(name)
    try:
        jsonschema.Draft202012Validator(schema).validate(manifest)
    except jsonschema.ValidationError as problem:
        raise Mistake(f"{problem.json_path}: {problem.message}") from None
    _unique_keys(schema, manifest, "$", schema["$defs"])


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
