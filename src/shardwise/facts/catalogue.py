"""Shapes of well-known public models, so that planning needs no network (models.json)."""

import json
from functools import cache
from importlib.resources import files
from typing import Any

from shardwise.facts.model import ModelShape, shape_from_config


@cache
def _records() -> dict[str, dict[str, Any]]:
    """Every known id, lower case -> its record: {"id", "config", "source"}."""
    text = files("shardwise.facts").joinpath("models.json").read_text(encoding="utf-8")
    found: dict[str, dict[str, Any]] = {}
    for name, record in json.loads(text).items():
        for each in (name, *record["also"]):
            found[each.casefold()] = {"id": each, **record}
    return found


def known_models() -> list[str]:
    """Hub ids of the catalogue."""
    return [record["id"] for record in _records().values()]


_ENDINGS = ("-hf", "-base", "-instruct", "-chat", "-it", "-pt")


def _loose(name: str) -> str:
    """How people write a model's name in a table: no owner, no ending, no 'meta-'."""
    text = name.casefold().rsplit("/", 1)[-1].replace("_", ".").removeprefix("meta-")
    for ending in _ENDINGS:
        text = text.removesuffix(ending)
    return text


@cache
def _by_loose_name() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for record in _records().values():
        for each in (record["id"], *record.get("names", ())):
            found.setdefault(_loose(each), record)
    return found


def named_shape(name: str) -> ModelShape | None:
    """The shape of a model as tables and papers name it ('Llama-2-7B', 'GPT-2-124M'); None: not known."""
    exact = catalogue_shape(name)
    if exact is not None:
        return exact
    record = _by_loose_name().get(_loose(name))
    return None if record is None else shape_from_config(record["config"], record["id"])


def catalogue_shape(name: str) -> ModelShape | None:
    """The shape of a known hub id, in any case, or of its last part alone; None when it is not known."""
    records = _records()
    record = records.get(name.casefold())
    if record is None and "/" not in name:
        found = [r for key, r in records.items() if key.rsplit("/", 1)[-1] == name.casefold()]
        record = found[0] if found else None
    return None if record is None else shape_from_config(record["config"], record["id"])
