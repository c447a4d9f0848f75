"""The course of a run as columns, thinned for showing without losing its spikes."""

from collections.abc import Sequence
from dataclasses import dataclass, fields

from shardwise.runs import Step

Column = tuple[float | None, ...]


@dataclass(frozen=True)
class Series:
    """Columns of equal length, one entry per shown step. `steps_total` counts the steps before thinning."""

    step: tuple[int, ...] = ()
    loss: Column = ()
    learning_rate: Column = ()
    grad_norm: Column = ()
    tokens_per_second: Column = ()
    allocated_bytes: Column = ()
    peak_allocated_bytes: Column = ()
    resident_bytes: Column = ()
    steps_total: int = 0

    def as_dict(self) -> dict[str, object]:
        return {field.name: getattr(self, field.name) for field in fields(self)}


COLUMNS = tuple(f.name for f in fields(Series) if f.name not in ("step", "steps_total"))
# A spike in one of these must be seen in the thinned curve; the others change slowly.
_SPIKY = ("loss", "grad_norm", "tokens_per_second")


def series(steps: Sequence[Step], most: int = 1000) -> Series:
    """At most `most` of the steps (at least the first and the last), as columns.

    Each bucket of neighbouring steps keeps its first step and the lowest and the highest of every column that
    can spike, so that a curve of a million steps drawn from a thousand has the same envelope.
    """
    kept = [steps[i] for i in thin([[getattr(s, c) for s in steps] for c in _SPIKY], len(steps), most)]
    columns = {c: tuple(_value(s, c) for s in kept) for c in COLUMNS}
    return Series(step=tuple(s.step for s in kept), **columns, steps_total=len(steps))


def thin(columns: Sequence[Sequence[float | None]], length: int, most: int) -> list[int]:
    """Indices to keep, in order: at most `most` of `length`."""
    if length <= most:
        return list(range(length))
    per_bucket = 1 + 2 * len(columns)
    buckets = max(1, (most - 1) // per_bucket)
    keep = {length - 1}
    for number in range(buckets):
        start, stop = number * length // buckets, (number + 1) * length // buckets
        keep.add(start)
        for column in columns:
            known = [i for i in range(start, stop) if _finite(column[i])]
            if known:
                keep.add(min(known, key=column.__getitem__))  # type: ignore[arg-type]
                keep.add(max(known, key=column.__getitem__))  # type: ignore[arg-type]
    return sorted(keep)


def _finite(value: float | None) -> bool:
    return value is not None and abs(value) < float("inf")


def _value(step: Step, column: str) -> float | None:
    value: float | None = getattr(step, column)
    if value is None and column == "tokens_per_second" and step.tokens and step.seconds:
        value = step.tokens / step.seconds
    return value if _finite(value) else None
