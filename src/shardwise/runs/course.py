"""The course of a run: its events added up, cheap to keep and to bring up to date while the run goes on.

Steps are kept as columns of numbers (a hundred thousand steps are a few MB), the rarer events as records.
"""

from array import array
from bisect import bisect_right
from dataclasses import dataclass, field
from math import isfinite, nan
from typing import Any

from pydantic import ValidationError

from shardwise.runs.folder import RunFolder
from shardwise.runs.records import EVENTS, Evaluation, Event, Sample, Start, Warned

COLUMNS = (
    "loss",
    "learning_rate",
    "grad_norm",
    "tokens_per_second",
    "allocated_bytes",
    "peak_allocated_bytes",
    "resident_bytes",
    "tokens",
    "seconds",
)


@dataclass
class Course:
    """`refresh` reads what was written since the last time and says whether there was anything.

    `columns` hold one number per step; NaN where a step has none or it is not finite.
    """

    run: RunFolder
    step: "array[int]" = field(default_factory=lambda: array("q"))
    columns: "dict[str, array[float]]" = field(default_factory=lambda: {c: array("d") for c in COLUMNS})
    evaluations: list[Evaluation] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    warnings: list[Warned] = field(default_factory=list)
    start: Start | None = None
    offset: int = 0

    def refresh(self) -> bool:
        try:
            size = self.run.events_path.stat().st_size
        except OSError:
            size = 0
        if size < self.offset:  # another file has taken its place
            self.offset, self.start = 0, None
            self._cut(-1)
            self.warnings = []
        before = self.offset
        for behind, fields in self.run.lines_from(self.offset):
            self.offset = behind
            self._add(fields)
        return self.offset != before

    def _add(self, fields: dict[str, Any]) -> None:
        kind = str(fields.get("kind"))
        step = fields.get("step")
        if kind == "step":
            if isinstance(step, int):
                self._add_step(step, fields)
            return
        try:
            event = EVENTS.get(kind, Event).model_validate(fields)
        except ValidationError:
            return
        if isinstance(event, Start):
            self.start = event
        elif isinstance(event, Evaluation):
            self.evaluations.append(event)
        elif isinstance(event, Sample):
            self.samples.append(event)
        elif isinstance(event, Warned):
            self.warnings.append(event)
        elif kind == "resume" and isinstance(step, int):
            self._cut(step)

    def _add_step(self, step: int, fields: dict[str, Any]) -> None:
        self.step.append(step)
        for name, column in self.columns.items():
            value = fields.get(name)
            column.append(value if isinstance(value, int | float) and isfinite(value) else nan)
        rate, tokens, seconds = (self.columns[c] for c in ("tokens_per_second", "tokens", "seconds"))
        if rate[-1] != rate[-1] and seconds[-1] > 0:
            rate[-1] = tokens[-1] / seconds[-1]

    def _cut(self, step: int) -> None:
        """A resume from the checkpoint of `step` undoes what came after it."""
        keep = bisect_right(self.step, step)
        del self.step[keep:]
        for column in self.columns.values():
            del column[keep:]
        self.evaluations = [e for e in self.evaluations if e.step <= step]
        self.samples = [e for e in self.samples if e.step <= step]

    def __len__(self) -> int:
        return len(self.step)

    def last(self, column: str) -> float | None:
        return _known(self.columns[column][-1]) if self.step else None

    def first(self, column: str) -> float | None:
        return _known(self.columns[column][0]) if self.step else None

    def highest(self, column: str) -> float | None:
        return max((v for v in self.columns[column] if v == v), default=None)

    def total(self, column: str) -> float | None:
        known = [v for v in self.columns[column] if v == v]
        return sum(known) if known else None


def _known(value: float) -> float | None:
    return value if value == value else None


def read_course(run: RunFolder) -> Course:
    """The course of a run up to now."""
    made = Course(run)
    made.refresh()
    return made
