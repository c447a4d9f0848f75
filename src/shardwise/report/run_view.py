"""Everything there is to show of a run, gathered once; text, JSON and HTML print the same."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from shardwise.estimate.memory.terms import TERMS
from shardwise.report.series import Series, series
from shardwise.runs import (
    CheckpointFolder,
    Course,
    Estimated,
    Evaluation,
    Measured,
    RunFolder,
    Sample,
    SamplePair,
    Status,
    Summary,
    Term,
    read_course,
)
from shardwise.runs.effective import Effective, recorded

Unit = Literal["bytes", "seconds", "tokens_per_second", "ratio"]


@dataclass(frozen=True)
class Comparison:
    """One number, said before and found after. None: not estimated, or not measured."""

    name: str
    unit: Unit
    estimate: float | None
    measured: float | None

    @property
    def difference(self) -> float | None:
        """(estimate - measured) / measured: positive when the estimate was too high."""
        if self.estimate is None or not self.measured:
            return None
        return (self.estimate - self.measured) / self.measured


@dataclass(frozen=True)
class RunView:
    name: str
    path: Path
    status: Status
    summary: Summary
    steps_planned: int | None
    memory: tuple[Comparison, ...]  # by term, then the peak
    speed: tuple[Comparison, ...]
    peak_resident_bytes: int | None
    series: Series
    evaluations: tuple[Evaluation, ...]
    samples: tuple[SamplePair, ...]
    checkpoints: tuple[CheckpointFolder, ...]
    warnings: tuple[str, ...]
    effective: Effective | None
    recipe_text: str
    plan: dict[str, Any]
    files: tuple[tuple[str, str], ...]  # (what, path)
    next_commands: tuple[tuple[str, str], ...]  # (what for, command)

    @property
    def evaluation_before(self) -> float | None:
        return self.summary.evaluation_before

    @property
    def evaluation_after(self) -> float | None:
        return self.summary.evaluation_after


def view_run(run: RunFolder, points: int = 1000, so_far: Course | None = None) -> RunView:
    """Read a run folder, finished or not; at most `points` steps are kept for curves.

    `so_far` is the run's course when the caller keeps one up to date.
    """
    seen = so_far or read_course(run)
    status = run.read_status()
    summary = run.summary() or _so_far(status, seen)
    plan = run.plan()
    estimate = summary.estimate if summary.estimate != Estimated() else _planned(plan)
    return RunView(
        name=run.name,
        path=run.path,
        status=status,
        summary=summary,
        steps_planned=seen.start.steps if seen.start else None,
        memory=_memory(estimate, summary.measured, seen),
        speed=_speed(estimate, summary.measured),
        peak_resident_bytes=summary.measured.peak_resident_bytes or _whole(seen.highest("resident_bytes")),
        series=series(seen, points),
        evaluations=tuple(seen.evaluations),
        samples=summary.samples or _pairs(seen.samples),
        checkpoints=tuple(run.checkpoints()),
        warnings=tuple(w.message for w in seen.warnings),
        effective=recorded(summary),
        recipe_text=run.recipe_text(),
        plan=plan,
        files=_files(run),
        next_commands=_next(run, status),
    )


def _so_far(status: Status, seen: Course) -> Summary:
    """A summary of a run that has not written one: it goes on, or it died."""
    held = seen.evaluations
    return Summary(
        state=status.state,
        steps=seen.step[-1] if len(seen) else 0,
        tokens=_whole(seen.total("tokens")),
        loss_first=seen.first("loss"),
        loss_last=seen.last("loss"),
        evaluation_before=held[0].loss if held and held[0].step == 0 else None,
        evaluation_after=held[-1].loss if held and held[-1].step > 0 else None,
    )


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)


def _planned(plan: dict[str, Any]) -> Estimated:
    try:
        return Estimated.model_validate(plan.get("estimate") or {})
    except ValidationError:
        return Estimated()


def _memory(estimate: Estimated, measured: Measured, seen: Course) -> tuple[Comparison, ...]:
    """By term in the order of the estimate's printing, then the peak of all."""
    said, found = _by_name(estimate.terms), _by_name(measured.terms)
    names = sorted({*said, *found}, key=lambda n: (TERMS.index(n) if n in TERMS else len(TERMS), n))
    rows = [
        Comparison(
            n,
            "bytes",
            said.get(n, 0 if said else None),
            found.get(n, 0 if found else None),
        )
        for n in names
        if said.get(n) or found.get(n)
    ]
    peak = measured.peak_allocated_bytes or seen.highest("peak_allocated_bytes")
    if estimate.peak_allocated_bytes is not None or peak is not None:
        rows.append(Comparison("peak allocated", "bytes", estimate.peak_allocated_bytes, peak))
    if measured.peak_reserved_bytes is not None:
        rows.append(Comparison("peak reserved", "bytes", None, measured.peak_reserved_bytes))
    return tuple(rows)


def _by_name(terms: Sequence[Term]) -> dict[str, int]:
    found: dict[str, int] = {}
    for term in terms:
        found[term.name] = found.get(term.name, 0) + term.bytes
    return found


def _speed(estimate: Estimated, measured: Measured) -> tuple[Comparison, ...]:
    rows = (
        Comparison("training time", "seconds", estimate.seconds, measured.training_seconds),
        Comparison(
            "tokens/s per GPU",
            "tokens_per_second",
            estimate.tokens_per_second_per_gpu,
            measured.tokens_per_second_per_gpu,
        ),
        Comparison("MFU", "ratio", None, measured.mfu),
    )
    return tuple(r for r in rows if r.estimate is not None or r.measured is not None)


def _pairs(samples: Sequence[Sample]) -> tuple[SamplePair, ...]:
    """First and last answer to each prompt, in order of the prompts; one answer stands before or after."""
    prompts = dict.fromkeys(s.prompt for s in samples)
    pairs = []
    for prompt in prompts:
        answers = [s for s in samples if s.prompt == prompt]
        first, last = answers[0], answers[-1]
        pairs.append(
            SamplePair(
                prompt=prompt,
                reference=first.reference,
                before=first.answer if first.step == 0 else None,
                after=last.answer if last.step > 0 else None,
            )
        )
    return tuple(pairs)


def _files(run: RunFolder) -> tuple[tuple[str, str], ...]:
    candidates = (
        ("adapter (PEFT format)", run.adapter_path),
        ("model", run.model_path),
        ("recipe, resolved", run.recipe_path),
        ("plan", run.plan_path),
        ("events, one line each", run.events_path),
        ("summary", run.summary_path),
        ("report to look at", run.report_path),
        ("logs of the ranks", run.logs_path),
        ("checkpoints", run.checkpoints_path),
    )
    return tuple((what, str(path)) for what, path in candidates if path.exists())


def _next(run: RunFolder, status: Status) -> tuple[tuple[str, str], ...]:
    path = shlex.quote(str(run.path))
    if status.state == "running":
        return (("watch it", f"shardwise show {path}"), ("see all runs", "shardwise runs"))
    if status.state in ("interrupted", "failed"):
        go_on = (("go on from the last checkpoint", f"shardwise train --resume {path}"),)
        return (*(go_on if run.checkpoints() else ()), ("see all runs", "shardwise runs"))
    commands = [("talk to it", f"shardwise chat {path}")] if run.result_path else []
    change = "lora.rank=32" if run.adapter_path.exists() else "optimizer.learning_rate=2e-5"
    commands += [
        ("look at its curves", f"shardwise show {path} --html report.html"),
        ("train again with a change", f"shardwise train {path}/recipe.yaml --set {change}"),
    ]
    return tuple(commands)
