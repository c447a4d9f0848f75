"""How long finished runs on this machine took against their estimates: kept with the user, used by later plans.

Every finished run adds a line. A plan for the same device multiplies its time by what the newest of them say, and
tells so; `shardwise calibrate --forget` deletes them.
"""

import json
import os
import platform
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import date
from math import exp, log
from pathlib import Path

VERSION = 1
NEWEST = 20  # runs that count
# Shorter runs tell of their start, not of their steps.
LEAST_STEPS, LEAST_SECONDS = 10, 5.0


@dataclass(frozen=True, slots=True)
class Finished:
    """One finished run. `estimated_seconds` is without what earlier runs had taught; `rates`: what it rested on."""

    host: str
    device: str
    ranks: int
    rates: str
    model: str
    method: str
    steps: int
    estimated_seconds: float
    measured_seconds: float
    date: str
    version: int = VERSION

    @property
    def ratio(self) -> float:
        return self.measured_seconds / self.estimated_seconds


@dataclass(frozen=True, slots=True)
class Experience:
    """What finished runs say of a device: the factor on an estimated time, from how many, and their range."""

    factor: float
    runs: int
    low: float
    high: float

    @property
    def words(self) -> str:
        times = "run" if self.runs == 1 else "runs"
        took = f"{self.low:.2f}" if self.runs == 1 else f"{self.low:.2f} to {self.high:.2f}"
        return (
            f"time x {self.factor:.2f}: {self.runs} finished {times} on this machine took {took} of the estimate "
            "(shardwise calibrate --forget starts anew)"
        )


def experience_path() -> Path:
    """Where finished runs of this machine are kept, one JSON object a line: SHARDWISE_CACHE, or the user's state."""
    cache, state = os.environ.get("SHARDWISE_CACHE"), os.environ.get("XDG_STATE_HOME")
    base = Path(state) if state else Path.home() / ".local" / "state"
    return (Path(cache) if cache else base / "shardwise") / "finished-runs.jsonl"


def remember(
    device: str,
    ranks: int,
    rates: str,
    model: str,
    method: str,
    steps: int,
    estimated_seconds: float,
    measured_seconds: float,
) -> bool:
    """Add a finished run; False where it is too short to tell anything."""
    if steps < LEAST_STEPS or measured_seconds < LEAST_SECONDS or estimated_seconds <= 0:
        return False
    run = Finished(
        platform.node(), device, ranks, rates, model, method, steps, estimated_seconds, measured_seconds,
        date.today().isoformat(),
    )  # fmt: skip
    path = experience_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(run)) + "\n")
    return True


def experience_of(device: str, rates: str) -> Experience | None:
    """What the newest finished runs on this machine's device say, as long as estimates rest on the same rates.

    The factor is the geometric mean of measured over estimated, together with one run that took its estimate: a
    single run moves it half the way (in logarithms), twenty nearly all of it. None without a run.
    """
    ratios = [r.ratio for r in _read() if r.device == device and r.rates == rates][-NEWEST:]
    if not ratios:
        return None
    factor = exp(sum(log(r) for r in ratios) / (len(ratios) + 1))
    return Experience(factor, len(ratios), min(ratios), max(ratios))


def _read() -> Iterator[Finished]:
    """Runs of this host; lines that are not one (another version, cut off) are left out."""
    try:
        lines = experience_path().read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        try:
            run = Finished(**json.loads(line))
        except (ValueError, TypeError):
            continue
        if run.host == platform.node() and run.version == VERSION:
            yield run
