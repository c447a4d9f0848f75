"""Stacked bars of memory: which term lies where, in shares of the widest thing drawn."""

from collections.abc import Iterable
from dataclasses import dataclass

from shardwise.estimate.memory.terms import TERMS


@dataclass(frozen=True)
class Segment:
    """`number` names the term beside its colour; `start` and `width` are percent of the drawing."""

    name: str
    bytes: float
    number: int
    start: float
    width: float


@dataclass(frozen=True)
class Bar:
    label: str
    total_bytes: float
    segments: tuple[Segment, ...]


def term_number(name: str) -> int:
    """1-based place of a term, the same on every page; what is no term comes behind them."""
    return TERMS.index(name) + 1 if name in TERMS else len(TERMS) + 1


def bar(label: str, terms: Iterable[tuple[str, float]], whole_bytes: float) -> Bar:
    """One bar on a scale where `whole_bytes` is the full width."""
    known = [(name, count) for name, count in terms if count > 0]
    segments, start = [], 0.0
    for name, count in sorted(known, key=lambda item: term_number(item[0])):
        width = 100 * count / whole_bytes if whole_bytes else 0.0
        segments.append(Segment(name, count, term_number(name), round(start, 3), round(width, 3)))
        start += width
    return Bar(label, sum(count for _, count in known), tuple(segments))
