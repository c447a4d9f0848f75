"""YAML 1.2 text <-> Recipe. Every problem of a file is reported at once, with its line."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from shardwise.errors import RecipeError, nearest
from shardwise.recipe.schema import Recipe

# Names people bring from other tools -> the key here. Only used in hints.
FOREIGN_KEYS = {
    "lr": "optimizer.learning_rate",
    "learning_rate": "optimizer.learning_rate",
    "weight_decay": "optimizer.weight_decay",
    "max_grad_norm": "optimizer.max_grad_norm",
    "num_train_epochs": "training.epochs",
    "num_epochs": "training.epochs",
    "num-epochs": "training.epochs",
    "epochs": "training.epochs",
    "max_steps": "training.max_steps",
    "per_device_train_batch_size": "training.micro_batch_size",
    "micro_batch_size": "training.micro_batch_size",
    "global_batch_size": "training.global_batch_size",
    "gradient_accumulation_steps": "training.global_batch_size (accumulation is derived from it)",
    "gradient_checkpointing": "training.activation_checkpointing",
    "bf16": "training.precision",
    "fp16": "training.precision",
    "seed": "training.seed",
    "max_seq_length": "data.sequence_length",
    "sequence_len": "data.sequence_length",
    "sequence_length": "data.sequence_length",
    "cutoff_len": "data.sequence_length",
    "rank": "lora.rank",
    "r": "lora.rank",
    "lora_r": "lora.rank",
    "lora_rank": "lora.rank",
    "lora_alpha": "lora.alpha",
    "lora_dropout": "lora.dropout",
    "target_modules": "lora.targets",
    "warmup_ratio": "schedule.warmup",
    "warmup_steps": "schedule.warmup",
    "lr_scheduler_type": "schedule.name",
    "output_dir": "run.folder",
    "save_steps": "checkpoint.every_steps",
    "eval_steps": "evaluation.every_steps",
    "base_model": "model.source",
    "model_name_or_path": "model.source",
    "load_in_4bit": "method: qlora",
}


def load_recipe(path: str | Path, settings: Sequence[str] = ()) -> Recipe:
    """Read a YAML file and apply `--set a.b=c` items.

    Raises RecipeError naming file and line of every problem.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        here = sorted(p.name for p in path.parent.glob("*.yaml")) if path.parent.is_dir() else []
        close = nearest(path.name, here)
        raise RecipeError(
            f"recipe '{path}' does not exist",
            f"no such file in '{path.parent}'",
            f"did you mean {close[0]}?"
            if close
            else "write one with: shardwise plan MODEL --data FILE --write recipe.yaml",
        ) from None
    except (OSError, UnicodeDecodeError) as problem:
        raise RecipeError(
            f"recipe '{path}' cannot be read", str(problem), "a recipe is a YAML file in UTF-8"
        ) from None
    return parse_recipe(text, str(path), settings)


def parse_recipe(text: str, name: str = "recipe", settings: Sequence[str] = ()) -> Recipe:
    """YAML text -> Recipe. `name` stands for the file in messages."""
    try:
        tree = YAML(typ="rt").load(text)
    except MarkedYAMLError as problem:
        mark = problem.problem_mark
        where = f"{name}, line {mark.line + 1}" if mark else name
        raise RecipeError(
            f"{where}: not valid YAML", str(problem.problem or problem), "check indentation and quotes there"
        ) from None
    except YAMLError as problem:
        raise RecipeError(f"{name}: not valid YAML", str(problem), "check the file's encoding") from None
    if not isinstance(tree, CommentedMap):
        found = "nothing" if tree is None else "a list" if isinstance(tree, list) else f"'{tree}'"
        raise RecipeError(
            f"{name}: not a recipe",
            f"expected keys and values at the top level, found {found}",
            "the shortest recipe is two lines: 'model: ...' and 'data: ...'",
        )
    for item in settings:
        apply_set(tree, item)
    try:
        return Recipe.model_validate(_plain(tree))
    except ValidationError as problem:
        raise _explain(problem, tree, name) from None


def apply_set(tree: dict[str, Any], item: str) -> None:
    """Put one `a.b=value` (value read as YAML) into a tree of mappings, in place."""
    key, equals, raw = item.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        raise RecipeError(
            f"--set {item}", "it is not of the form key=value", "write --set training.max_steps=100"
        )
    try:
        value = YAML(typ="safe").load(raw) if raw.strip() else None
    except YAMLError:
        value = raw
    node: Any = tree
    for part in parts[:-1]:
        below = node.get(part)
        if isinstance(below, str):  # `model: NAME` was the short form of a section
            below = {{"model": "source", "data": "train", "engine": "name"}.get(part, part): below}
            node[part] = below
        if not isinstance(below, dict):
            below = node[part] = {}
        node = below
    node[parts[-1]] = value


def dump_recipe(recipe: Recipe, comment: str = "", full: bool = True) -> str:
    """Recipe -> YAML text that loads back to an equal recipe. `full=False` leaves out defaults."""
    tree = recipe.model_dump(mode="json", exclude_defaults=not full)
    out = io.StringIO()
    yaml = YAML()
    yaml.default_flow_style = False
    yaml.width = 100
    yaml.dump(tree, out)
    head = "".join(f"# {line}\n" for line in comment.splitlines())
    return head + out.getvalue()


def _plain(node: Any) -> Any:
    """ruamel's round-trip nodes -> plain dict, list and scalars."""
    if isinstance(node, dict):
        return {str(key): _plain(value) for key, value in node.items()}
    if isinstance(node, list):
        return [_plain(value) for value in node]
    for kind in (bool, int, float, str):
        if isinstance(node, kind):
            return kind(node)
    return node


def _line(tree: Any, location: Sequence[str | int]) -> int | None:
    """1-based line of a key, or of the nearest section above it."""
    line = None
    for part in location:
        if not isinstance(tree, dict | list) or not hasattr(tree, "lc"):
            break
        try:
            line = (tree.lc.key(part) if isinstance(tree, dict) else tree.lc.item(part))[0] + 1
            tree = tree[part]  # type: ignore[index]
        except (KeyError, IndexError, TypeError, AttributeError):
            break
    return line


def _section(location: Sequence[str | int]) -> type[BaseModel] | None:
    """The model class a location lies in."""
    model: Any = Recipe
    for part in (p for p in location if not isinstance(p, int)):
        fields = getattr(model, "model_fields", {})
        if part not in fields:
            return None
        annotation = fields[part].annotation
        models = [
            a for a in (annotation, *get_args(annotation)) if isinstance(a, type) and issubclass(a, BaseModel)
        ]
        if not models:
            return None
        model = models[0]
    return model


def _keys_anywhere() -> dict[str, str]:
    """Every leaf key -> its dotted path."""
    return {
        key: f"{name}.{key}"
        for name in Recipe.model_fields
        if (section := _section([name]))
        for key in section.model_fields
    }


def _unknown_key(location: Sequence[str | int]) -> tuple[str, str]:
    """What to say about a key that is not there, and where it may belong."""
    key = str(location[-1])
    plain = key.replace("-", "_")
    section = _section(location[:-1])
    known = list(section.model_fields) if section else []
    parts = list(map(str, location[:-1]))
    where = f"in section '{'.'.join(parts)}'" if parts else "at the top level"
    # Where each name would be right: foreign names first, then this section, then all others.
    places = {**_keys_anywhere(), **{k: ".".join([*parts, k]) for k in known}, **FOREIGN_KEYS}
    if plain in known:
        places[plain] = ".".join([*parts, plain])
    close = nearest(plain, known, 1, cutoff=0.75) or nearest(plain, places, 1)
    hint = f"did you mean {places[close[0]]}?" if close else f"keys allowed there: {', '.join(known)}"
    return f"unknown key '{key}' {where}", hint


def _explain(problem: ValidationError, tree: Any, name: str) -> RecipeError:
    """All problems of a recipe in one error; unions are told once, by the branch that says most."""
    found: dict[tuple[str | int, ...], tuple[str, str]] = {}
    for item in problem.errors(include_url=False):
        location = tuple(item["loc"])
        keys = tuple(p for p in location if _is_key(p, location))
        if item["type"] == "extra_forbidden":
            found[keys] = _unknown_key(keys)
        elif item["type"] == "missing":
            dotted = ".".join(map(str, keys))
            found[keys] = (f"'{dotted}' is missing", f"add '{dotted}:' with a value")
        else:
            value = item["input"]
            shown = repr(value) if not isinstance(value, dict | list) else type(value).__name__
            dotted = ".".join(map(str, keys)) or "recipe"
            message = _PLAINER.get(item["type"]) or item["msg"].removeprefix("Value error, ")
            message = message[0].lower() + message[1:]
            named = f"{dotted} = {shown}:" if keys else "the recipe as a whole:"
            text, hint = found.get(keys, (named, _type_hint(keys)))
            joined = f"{text} {message}" if keys not in found else f"{text}; or {message.lower()}"
            found[keys] = (joined if message not in text else text, hint)
    places = []
    inner = {keys[:n] for keys in found for n in range(1, len(keys))}
    for keys, (text, hint) in found.items():
        if keys in inner:  # told by what lies below it
            continue
        line = _line(tree, keys)
        places.append((line or 0, f"{name}, line {line}: {text}" if line else f"{name}: {text}", hint))
    places.sort(key=lambda place: place[0])
    if len(places) == 1:
        return RecipeError(
            places[0][1], "the recipe is refused as it stands; nothing was started", places[0][2]
        )
    what = f"{name}: {len(places)} problems"
    why = "\n       ".join(f"{text} ({hint})" for _, text, hint in places)
    return RecipeError(what, why, "mend all of them; keys and defaults are listed by: shardwise recipe")


def _is_key(part: str | int, location: Sequence[str | int]) -> bool:
    """pydantic puts names of union branches into locations; keep what stands in the file."""
    if isinstance(part, int):
        return True
    return part == location[0] or (not any(c in part for c in "[](),") and part not in _BRANCHES)


_PLAINER = {
    "model_type": "should be a section (keys and values)",
    "tuple_type": "should be a list",
}
_BRANCHES = {"int", "float", "str", "bool", "tuple", "literal", "constrained-int", "constrained-float"}


def _type_hint(location: Sequence[str | int]) -> str:
    section = _section(location[:-1]) if location else None
    field = section.model_fields.get(str(location[-1])) if section else None
    if field is None:
        return "see: shardwise recipe"
    default = "" if field.is_required() or field.default is None else f" (default {field.default})"
    return f"{'.'.join(map(str, location))}: {field.description}{default}"
