"""Effective training time: what share of a run's wall time went into steps that count."""

from dataclasses import dataclass, fields

from shardwise.runs.folder import RunFolder
from shardwise.runs.records import Checkpoint, End, Evaluation, Event, Fault, Resume, Start, Step, Summary


@dataclass(frozen=True)
class Effective:
    """Seconds of wall time by where they went. `other` is loading, evaluation and export.

    `lost_seconds`: work that a resume from an earlier checkpoint undid, the step in which a rank died included.
    `detection_seconds`: from a rank's last sign of life until its launcher noticed. `restart_seconds`: from there
    to the first step after it. `away_seconds`: nobody was at work (stopped by a person or a scheduler).
    `saving_seconds`: how long training stood still for checkpoints.
    """

    wall_seconds: float = 0.0
    step_seconds: float = 0.0
    lost_seconds: float = 0.0
    lost_steps: int = 0
    detection_seconds: float = 0.0
    restart_seconds: float = 0.0
    saving_seconds: float = 0.0
    away_seconds: float = 0.0
    starts: int = 0
    skipped_steps: int = 0  # without an update, because of a loss or gradient that was not finite

    @property
    def share(self) -> float:
        return self.step_seconds / self.wall_seconds if self.wall_seconds > 0 else 0.0

    @property
    def other_seconds(self) -> float:
        known = self.step_seconds + self.lost_seconds + self.detection_seconds + self.restart_seconds
        return max(0.0, self.wall_seconds - known - self.saving_seconds - self.away_seconds)

    def __str__(self) -> str:
        parts = [
            f"effective training time {self.share:.0%}: "
            f"{self.step_seconds:.1f} s of steps in {self.wall_seconds:.1f} s",
            f"saving {self.saving_seconds:.1f} s",
        ]
        if self.starts > 1 or self.lost_steps:
            parts.append(
                f"{self.lost_steps} steps lost ({self.lost_seconds:.1f} s), faults noticed in "
                f"{self.detection_seconds:.1f} s, started again in {self.restart_seconds:.1f} s, "
                f"{self.away_seconds:.1f} s away"
            )
        if self.skipped_steps:
            parts.append(f"{self.skipped_steps} steps skipped")
        parts.append(f"loading, evaluation and the rest {self.other_seconds:.1f} s")
        return "; ".join(parts)


def recorded(summary: Summary) -> Effective | None:
    """What a finished run wrote into its summary; None where it is not there."""
    found = (summary.model_extra or {}).get("effective")
    known = {f.name for f in fields(Effective)}
    return Effective(**{k: v for k, v in found.items() if k in known}) if isinstance(found, dict) else None


def effective(run: RunFolder) -> Effective:
    """From the run's events; zeros for a run that has none."""
    first = last = saving = lost = away = detection = restart = 0.0
    lost_steps, starts = 0, 0
    skipped: set[int] = set()
    noticed: float | None = None  # a fault after which no step has come yet
    kept: list[Step] = []
    for event in run.events():
        first = first or event.time
        if isinstance(event, Start):
            starts += 1
        elif isinstance(event, Fault):
            silent = min(event.silent_seconds or 0.0, max(0.0, event.time - last))
            detection += silent
            lost += max(0.0, event.time - silent - last)  # the step it was at
            noticed = event.time
        elif isinstance(event, Step):
            if noticed is not None:
                restart += max(0.0, event.time - (event.seconds or 0.0) - noticed)
                noticed = None
            kept.append(event)
        elif isinstance(event, Resume):
            if last and noticed is None:
                away += event.time - last
            undone = [s for s in kept if s.step > event.step]
            lost, lost_steps = lost + sum(s.seconds or 0.0 for s in undone), lost_steps + len(undone)
            kept = [s for s in kept if s.step <= event.step]
        elif isinstance(event, Checkpoint):
            saving += event.seconds or 0.0
        if event.model_dump().get("skipped"):
            skipped.add(int(event.model_dump().get("step") or 0))
        if _sign(event):
            last = event.time
    steps = sum(s.seconds or 0.0 for s in kept)
    return Effective(
        max(0.0, last - first),
        steps,
        lost,
        lost_steps,
        detection,
        restart,
        saving,
        away,
        starts,
        len(skipped),
    )


def _sign(event: Event) -> bool:
    return isinstance(event, Start | Step | Checkpoint | Evaluation | Fault | Resume | End)
