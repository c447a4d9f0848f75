"""The score of the estimates against measured runs, as tables and as JSON."""

from collections.abc import Callable
from typing import Any

from shardwise.plan.accuracy import Compared, Score
from shardwise.plan.rows import Row

GROUPS: dict[str, Callable[[Row], str]] = {
    "source": lambda r: r.text("source") or "-",
    "method": lambda r: r.text("method"),
    "sharding": lambda r: r.stack.sharding if r.stack else r.text("sharding"),
    "GPU": lambda r: r.text("gpu_kind"),
    "family": lambda r: r.shape.family if r.shape else r.text("family"),
    "memory kind": lambda r: r.memory_kind,
}


def accuracy_text(memory: Score, throughput: Score, worst: int = 10) -> str:
    """Both scores, overall and by group, the worst rows, and what was declined."""
    parts = []
    for name, score in (("memory", memory), ("throughput", throughput)):
        parts.append(_section(name, score, worst))
    return "\n\n".join(parts) + "\n"


def _section(name: str, score: Score, worst: int) -> str:
    lines = [f"{name}: {len(score.compared)} rows scored, {len(score.declined)} declined"]
    if not score.compared:
        return "\n".join(lines + _declined(score))
    lines.append(_HEAD)
    lines.append(_line("all", score))
    for label, key in GROUPS.items():
        groups = score.by(key)
        if len(groups) > 1 and not (name == "throughput" and label == "memory kind"):
            lines.append(f"by {label}")
            lines += [_line(f"  {group}", part) for group, part in groups.items()]
    lines.append("furthest off")
    for c in sorted(score.compared, key=lambda c: -abs(c.error))[:worst]:
        lines.append(f"  {c.row.id:20} {c.error:+7.1%}  measured {_show(name, c.measured)}, "
                     f"estimated {_show(name, c.estimated)}")  # fmt: skip
    if score.out_of_memory:
        passed = sum(o.passed for o in score.out_of_memory)
        lines.append(f"out of memory: {passed} of {len(score.out_of_memory)} are not called a sure fit")
        for o in score.out_of_memory:
            if not o.passed:
                lines.append(
                    f"  {o.row.id:20} estimated {_show(name, o.needed)} of {_show(name, o.capacity)}"
                )
    return "\n".join(lines + _declined(score))


_HEAD = f"{'':24} {'rows':>5} {'median':>8} {'median abs':>11} {'p90 abs':>8} {'in range':>9}"


def _line(name: str, score: Score) -> str:
    return (
        f"{name:24} {len(score.compared):5d} {score.median_signed:+8.1%} {score.median_absolute:11.1%} "
        f"{score.p90_absolute:8.1%} {score.range_coverage:9.0%}"
    )


def _show(name: str, value: float) -> str:
    return f"{value / 2**30:.1f} GiB" if name == "memory" else f"{value:,.0f} tokens/s"


def _declined(score: Score) -> list[str]:
    reasons = score.reasons().most_common()
    return (["declined"] if reasons else []) + [f"  {count:4d}  {reason}" for reason, count in reasons]


def accuracy_json(memory: Score, throughput: Score) -> dict[str, Any]:
    """{"memory": ..., "throughput": ...} with counts, errors as fractions, and every row."""
    return {"memory": _score_json(memory), "throughput": _score_json(throughput)}


def _score_json(score: Score) -> dict[str, Any]:
    found: dict[str, Any] = {
        "scored": len(score.compared),
        "declined": len(score.declined),
        "median_signed": score.median_signed,
        "median_absolute": score.median_absolute,
        "p90_absolute": score.p90_absolute,
        "range_coverage": score.range_coverage,
        "groups": {
            label: {name: _group_json(part) for name, part in score.by(key).items()}
            for label, key in GROUPS.items()
        },
        "rows": [_row_json(c) for c in score.compared],
        "declined_rows": [{"id": row.id, "reason": reason} for row, reason in score.declined],
    }
    if score.out_of_memory:
        found["out_of_memory"] = [
            {"id": o.row.id, "estimated": o.needed, "capacity": o.capacity, "passed": o.passed}
            for o in score.out_of_memory
        ]
    return found


def _group_json(score: Score) -> dict[str, Any]:
    return {
        "scored": len(score.compared),
        "median_signed": score.median_signed,
        "median_absolute": score.median_absolute,
        "p90_absolute": score.p90_absolute,
    }


def _row_json(c: Compared) -> dict[str, Any]:
    return {"id": c.row.id, "measured": c.measured, "estimated": c.estimated, "low": c.low, "high": c.high,
            "error": c.error, "covered": c.covered}  # fmt: skip


def markdown_table(score: Score, groups: tuple[str, ...] = ("method", "GPU", "source")) -> str:
    """The score as a table for the docs: all rows, then by group."""
    lines = ["| | rows | median | median abs | p90 abs | in range |", "|---|---|---|---|---|---|"]
    parts = [("all", score)] + [
        (name, part) for label in groups for name, part in score.by(GROUPS[label]).items()
    ]
    for name, part in parts:
        lines.append(
            f"| {name} | {len(part.compared)} | {part.median_signed:+.1%} | {part.median_absolute:.1%} | "
            f"{part.p90_absolute:.1%} | {part.range_coverage:.0%} |"
        )
    return "\n".join(lines)
