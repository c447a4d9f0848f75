"""A rank's sign of life: where it is, since when, and how long it may take. Written often, read by the launcher.

One small binary file per rank, overwritten in place: a beat costs a few microseconds, no allocation and no
lock. Times are of the machine's monotonic clock, which all its processes share.
"""

import os
import struct
import time
from dataclasses import dataclass
from pathlib import Path

_LAYOUT = struct.Struct("<qq16sdd")  # beats so far, step, phase, time, limit


@dataclass(frozen=True)
class Beat:
    """`count` rises with every beat and is the same on every rank at the same place of the program."""

    count: int
    step: int
    phase: str
    time_seconds: float
    limit_seconds: float

    def overdue_seconds(self, now: float) -> float:
        """Seconds beyond what the rank allowed itself; negative while there is time."""
        return now - self.time_seconds - self.limit_seconds

    def __str__(self) -> str:
        where = f"step {self.step}, " if self.step else ""
        return f"{where}{self.phase}"


def heartbeat_path(logs: Path, rank: int) -> Path:
    return logs / f"heartbeat-{rank}"


def stacks_path(logs: Path, rank: int) -> Path:
    """Where a rank writes its Python stacks when it is sent SIGUSR2."""
    return logs / f"stacks-{rank}.txt"


class Heart:
    """Writes one rank's beats."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        self._count = 0

    def beat(self, step: int, phase: str, limit_seconds: float) -> None:
        self._count += 1
        os.pwrite(
            self._file,
            _LAYOUT.pack(self._count, step, phase.encode()[:16], time.monotonic(), limit_seconds),
            0,
        )

    def close(self) -> None:
        os.close(self._file)


def read_beat(path: Path) -> Beat | None:
    """None when there is no beat yet."""
    try:
        count, step, phase, at, limit = _LAYOUT.unpack(path.read_bytes())
    except (OSError, struct.error):
        return None
    return Beat(count, step, phase.rstrip(b"\0").decode("utf-8", "replace"), at, limit)
