"""The recipe's keys as text: the reference page and `shardwise recipe` are made from it."""

from typing import Any, get_args

from pydantic import BaseModel

from shardwise.recipe.schema import Recipe


def describe() -> str:
    """A commented YAML skeleton: every key, its default, one line of help."""
    return "\n".join(_lines(Recipe, 0))


def _lines(model: type[BaseModel], depth: int) -> list[str]:
    lines = []
    for key, field in model.model_fields.items():
        pad = "  " * depth
        inner = [
            a
            for a in (field.annotation, *get_args(field.annotation))
            if isinstance(a, type) and issubclass(a, BaseModel)
        ]
        if inner:
            lines += [f"{pad}{key}:  # {field.description}", *_lines(inner[0], depth + 1)]
            continue
        default = "# required" if field.is_required() else _yaml(field.default)
        lines.append(f"{pad}{key}: {default}".ljust(46) + f"  # {field.description}")
    return lines


def _yaml(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return "[" + ", ".join(map(str, value)) + "]"
    return str(value)
