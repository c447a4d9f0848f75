"""A run as one JSON object: what `show --json` prints and what the web page and report.html draw from."""

from dataclasses import asdict
from typing import Any

from shardwise.report.run_view import Comparison, RunView


def run_json(view: RunView) -> dict[str, Any]:
    """Base units; null where nothing is known. `series` holds as many steps as the view was made with."""
    return {
        **run_row(view),
        "path": str(view.path),
        "summary": view.summary.model_dump(mode="json"),
        "memory": [_row(r) for r in view.memory],
        "speed": [_row(r) for r in view.speed],
        "series": view.series.as_dict(),
        "evaluations": [e.model_dump(mode="json", exclude={"kind"}) for e in view.evaluations],
        "samples": [s.model_dump(mode="json") for s in view.samples],
        "checkpoints": [{"step": c.step, "path": str(c.path)} for c in view.checkpoints],
        "effective": {**asdict(e), "share": e.share, "other_seconds": e.other_seconds}
        if (e := view.effective)
        else None,
        "warnings": list(view.warnings),
        "plan": view.plan,
        "files": dict(view.files),
        "next": [{"for": what, "command": command} for what, command in view.next_commands],
    }


def run_row(view: RunView) -> dict[str, Any]:
    """One line of `runs --json`."""
    s = view.summary
    return {
        "name": view.name,
        "state": view.status.state,
        "reason": view.status.reason,
        "steps": s.steps,
        "steps_planned": view.steps_planned,
        "tokens": s.tokens,
        "seconds": s.seconds.total,
        "loss_first": s.loss_first,
        "loss_last": s.loss_last,
        "evaluation_before": s.evaluation_before,
        "evaluation_after": s.evaluation_after,
        "peak_allocated_bytes": next((r.measured for r in view.memory if r.name == "peak allocated"), None),
        "peak_resident_bytes": view.peak_resident_bytes,
    }


def _row(row: Comparison) -> dict[str, Any]:
    return {
        "name": row.name,
        "unit": row.unit,
        "estimate": row.estimate,
        "measured": row.measured,
        "difference": row.difference,
    }
