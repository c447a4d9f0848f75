"""What is different between the run that wrote a checkpoint and the run that wants to go on from it.

Three kinds of difference: of *layout*, which change where and how the same steps are computed and are told;
those that change the numbers, which are refused until each is accepted by name; and those that give the
count of steps done another meaning (or leave saved tensors without a place), which are always refused.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from shardwise.errors import UsageError, nearest

Kind = Literal["layout", "numbers", "meaning"]

# Keys (or sections, with a dot at the end) by kind; every other key of the recipe changes the numbers.
LAYOUT = (
    "engine.",
    "checkpoint.",
    "evaluation.",
    "run.",
    "launch.",
    "training.micro_batch_size",
    "training.activation_checkpointing",
    "training.loss",
    "training.compile",
    "training.non_finite",
    "training.non_finite_limit",
    # What matters of these is what the files hold: see `data.rows` and `model.weights`.
    "model.source",
    "model.revision",
    "data.train",
    "data.validation",
    "versions.python",
)
MEANING = {
    "method": "other tensors are trained",
    "lora.rank": "the saved adapter has another shape",
    "lora.targets": "the saved adapter lies on other layers",
    "lora.dora": "the saved adapter has other tensors",
    "optimizer.name": "the saved optimizer states are of another rule",
    "training.global_batch_size": "steps done were counted in batches of the old size",
    "data.sequence_length": "steps done were counted in sequences of the old length",
    "data.packing": "steps done were counted in sequences packed the old way",
    "data.streaming": "rows come in another order",
    "data.buffer_rows": "steps done were counted in sequences packed the old way",
}


ACCEPT = "SHARDWISE_ACCEPT"  # environment of ranks that a scheduler starts: fields, with commas between


@dataclass(frozen=True)
class Change:
    """`field` is a recipe key, `data.rows`, `data.held_out`, `model.weights` or `versions.PACKAGE`."""

    field: str
    old: Any
    new: Any
    kind: Kind

    def __str__(self) -> str:
        return f"{self.field} was {_shown(self.old)}, is {_shown(self.new)}"


def facts(
    recipe: Mapping[str, Any], rows: str, held_out: str, weights: str, versions: Mapping[str, str]
) -> dict[str, Any]:
    """What a checkpoint keeps to be compared with later: JSON values only."""
    return {
        "recipe": dict(recipe),
        "data": {"rows": rows, "held_out": held_out},
        "model": {"weights": weights},
        "versions": dict(versions),
    }


def compare(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[Change]:
    """Every difference between two `facts`, in the order of the recipe's keys."""
    old, new = _flat(saved), _flat(now)
    return [
        Change(field, old.get(field), new.get(field), _kind(field))
        for field in dict.fromkeys((*old, *new))
        if old.get(field) != new.get(field) and not _idle(field, old, new)
    ]


def accepted_of(environment: Mapping[str, str]) -> set[str]:
    """Fields whose change is wanted, where nobody can type --accept."""
    return {field.strip() for field in environment.get(ACCEPT, "").split(",") if field.strip()}


def check(changes: Sequence[Change], accepted: Iterable[str], step: int) -> None:
    """Raise UsageError naming each change that is not accepted, or that nobody can accept."""
    accepted = set(accepted)
    known = {c.field for c in changes}
    for name in sorted(accepted - known):
        close = nearest(name, known)
        raise UsageError(
            f"--accept {name}: this has not changed",
            f"changed since step {step}: {', '.join(sorted(known)) or 'nothing'}",
            f"did you mean {close[0]}?" if close else "leave it out",
        )
    hopeless = [c for c in changes if c.kind == "meaning"]
    if hopeless:
        raise UsageError(
            f"the run cannot go on from step {step}: {'; '.join(map(str, hopeless))}",
            "; ".join(f"{c.field}: {MEANING[c.field]}" for c in hopeless),
            f"set {' and '.join(f'{c.field} back to {_shown(c.old)}' for c in hopeless)}, or start a new run",
        )
    refused = [c for c in changes if c.kind == "numbers" and c.field not in accepted]
    if refused:
        raise UsageError(
            f"changed since the checkpoint of step {step}: {'; '.join(map(str, refused))}",
            "the resumed run would not be the one that was interrupted",
            "undo the change, or say that you want it: " + " ".join(f"--accept {c.field}" for c in refused),
        )


def _kind(field: str) -> Kind:
    if field in MEANING:
        return "meaning"
    if any(field == key or (key.endswith(".") and field.startswith(key)) for key in LAYOUT):
        return "layout"
    return "numbers"


def _idle(field: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    """Whether a difference concerns nothing that this run uses."""
    if field.startswith("lora."):
        return old.get("method") == "full" == new.get("method")
    if field == "data.buffer_rows":
        return not new.get("data.streaming")
    if field.startswith("quantization.") or field == "versions.bitsandbytes":
        eight_bit = "8bit" in str(new.get("optimizer.name"))
        return new.get("method") != "qlora" and not (eight_bit and field.startswith("versions"))
    if field == "versions.deepspeed":
        return "deepspeed" not in (old.get("engine.name"), new.get("engine.name"))
    if field == "versions.peft":
        return new.get("method") == "full"
    return False


def _flat(found: Mapping[str, Any]) -> dict[str, Any]:
    flat = dict(_leaves(found.get("recipe", {}), ""))
    for part in ("data", "model", "versions"):
        flat.update(_leaves(found.get(part, {}), f"{part}."))
    return flat


def _leaves(tree: Mapping[str, Any], prefix: str) -> Iterable[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", list(value) if isinstance(value, tuple) else value


def _shown(value: Any) -> str:
    return "not there" if value is None else str(value)
