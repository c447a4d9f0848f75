"""The course of a run as columns, thinned for showing without losing its spikes."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from math import isfinite

from shardwise.runs import Course

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


def series(course: Course, most: int = 1000) -> Series:
    """At most `most` of a run's steps (at least the first and the last), as columns.

    Each bucket of neighbouring steps keeps its first step and the lowest and the highest of every column that
    can spike, so that a curve of a million steps drawn from a thousand has the same envelope.
    """
    kept = thin([course.columns[c] for c in _SPIKY], len(course), most)
    columns = {c: tuple(_value(course.columns[c][i]) for i in kept) for c in COLUMNS}
    return Series(step=tuple(course.step[i] for i in kept), **columns, steps_total=len(course))


def _value(number: float) -> float | None:
    """Six digits: more cannot be seen, and cost transfer."""
    return float(f"{number:.6g}") if isfinite(number) else None


def thin(columns: Sequence[Sequence[float]], length: int, most: int) -> list[int]:
    """Indices to keep, in order: at most `most` of `length`. NaN is never the lowest nor the highest."""
    if length <= most:
        return list(range(length))
    per_bucket = 1 + 2 * len(columns)
    buckets = max(1, (most - 1) // per_bucket)
    keep = {length - 1}
    for number in range(buckets):
        start, stop = number * length // buckets, (number + 1) * length // buckets
        keep.add(start)
        for column in columns:
            part = [v for v in column[start:stop] if isfinite(v)]
            if part:
                keep.add(_find(column, min(part), start))
                keep.add(_find(column, max(part), start))
    return sorted(keep)


def _find(column: Sequence[float], value: float, start: int) -> int:
    while column[start] != value:
        start += 1
    return start
