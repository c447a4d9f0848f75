"""Effective training time: what share of a run's wall time went into steps that count."""

from dataclasses import dataclass

from shardwise.runs.folder import RunFolder
from shardwise.runs.records import Checkpoint, End, Evaluation, Resume, Start, Step


@dataclass(frozen=True)
class Effective:
    """Seconds of wall time by where they went. `other` is loading, starting again, evaluation and export.

    `lost_seconds`: steps that a resume from an earlier checkpoint undid; `away_seconds`: from the last sign of
    one start of the run to the beginning of the next (detection, restart, or nobody at work).
    """

    wall_seconds: float
    step_seconds: float
    lost_seconds: float
    lost_steps: int
    saving_seconds: float
    away_seconds: float
    starts: int

    @property
    def share(self) -> float:
        return self.step_seconds / self.wall_seconds if self.wall_seconds > 0 else 0.0

    @property
    def other_seconds(self) -> float:
        known = self.step_seconds + self.lost_seconds + self.saving_seconds + self.away_seconds
        return max(0.0, self.wall_seconds - known)

    def __str__(self) -> str:
        parts = [
            f"effective training time {self.share:.0%}: "
            f"{self.step_seconds:.1f} s of steps in {self.wall_seconds:.1f} s",
            f"saving {self.saving_seconds:.1f} s",
        ]
        if self.starts > 1:
            parts.append(
                f"{self.lost_steps} steps lost ({self.lost_seconds:.1f} s), {self.away_seconds:.1f} s away in "
                f"{self.starts - 1} interruptions"
            )
        parts.append(f"loading, evaluation and the rest {self.other_seconds:.1f} s")
        return "; ".join(parts)


def effective(run: RunFolder) -> Effective:
    """From the run's events; zeros for a run that has none."""
    first = last = saving = lost = away = 0.0
    lost_steps, starts = 0, 0
    kept: list[Step] = []
    for event in run.events():
        first = first or event.time
        if isinstance(event, Resume) and last:
            away += event.time - last
        if isinstance(event, Start):
            starts += 1
        if isinstance(event, Step):
            kept.append(event)
        elif isinstance(event, Resume):
            undone = [s for s in kept if s.step > event.step]
            lost, lost_steps = lost + sum(s.seconds or 0.0 for s in undone), lost_steps + len(undone)
            kept = [s for s in kept if s.step <= event.step]
        elif isinstance(event, Checkpoint):
            saving += event.seconds or 0.0
        if isinstance(event, Start | Step | Checkpoint | Evaluation | Resume | End):
            last = event.time
    steps = sum(s.seconds or 0.0 for s in kept)
    return Effective(max(0.0, last - first), steps, lost, lost_steps, saving, away, starts)
