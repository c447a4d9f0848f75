"""How a quantity of a run is printed: with its unit, and '-' where nobody knows it."""

from shardwise.report.run_view import Comparison, Unit
from shardwise.units import format_bytes, format_seconds

UNKNOWN = "-"


def show(value: float | None, unit: Unit) -> str:
    if value is None:
        return UNKNOWN
    if unit == "bytes":
        return format_bytes(value)
    if unit == "seconds":
        return format_seconds(value)
    if unit == "ratio":
        return f"{value:.1%}"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def show_difference(row: Comparison) -> str:
    """+3.1 %: the estimate was 3.1 % too high. Percentages end at ten times: the peaks were of two moments."""
    if row.difference is None:
        return UNKNOWN
    return "over 10 x" if row.difference > 9 else _percent(row.difference)


def show_loss(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.4f}"


def show_course(before: float | None, after: float | None) -> str:
    """'3.3100 → 2.6200'; '-' where neither end is known."""
    if before is None and after is None:
        return UNKNOWN
    return f"{show_loss(before)} → {show_loss(after)}"


def show_change(before: float | None, after: float | None) -> str:
    if before is None or after is None or not before:
        return UNKNOWN
    return _percent((after - before) / abs(before))


def _percent(share: float) -> str:
    return f"{round(share * 100, 1) + 0.0:+.1f} %"  # + 0.0: never -0.0
