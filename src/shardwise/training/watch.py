"""A rank's side of the watchdog: signs of life for the launcher, and Python stacks when it asks for them."""

import faulthandler
import signal
import statistics
from collections import deque
from pathlib import Path

from shardwise.runs.heartbeat import Heart, heartbeat_path, stacks_path

MEASURED_STEPS = 3  # before a median means something
LIMIT_STEPS = 3  # a rank without a beat for so many median steps counts as hung
# Seconds without a sign of life outside of steps: loading, compiling and saving of large models take long.
START_SECONDS, EVALUATION_SECONDS, SAVE_SECONDS, FIRST_STEPS_SECONDS = 3600.0, 900.0, 3600.0, 900.0
END_SECONDS = 300.0  # also of a rank on its way out with an error


class Watch:
    """Beats at every part of a step. Without `logs` it does nothing (a loop under test)."""

    def __init__(self, logs: Path | None = None, rank: int = 0, floor_seconds: float = 10.0) -> None:
        self.floor_seconds = floor_seconds
        self._heart: Heart | None = None
        self._recent: deque[float] = deque(maxlen=50)
        if logs is None:
            return
        self._heart = Heart(heartbeat_path(logs, rank))
        # Written by the signal handler itself, in C: also from inside a collective that never returns.
        self._stacks = stacks_path(logs, rank).open("w")
        faulthandler.register(signal.SIGUSR2, file=self._stacks, all_threads=True, chain=False)
        self.beat(0, "start", START_SECONDS)

    @property
    def step_limit_seconds(self) -> float:
        """How long a part of a step may take before the launcher asks what is going on."""
        if len(self._recent) < MEASURED_STEPS:
            return max(self.floor_seconds, FIRST_STEPS_SECONDS)
        return max(self.floor_seconds, LIMIT_STEPS * statistics.median(self._recent))

    def beat(self, step: int, phase: str, limit_seconds: float | None = None) -> None:
        if self._heart is not None:
            limit = self.step_limit_seconds if limit_seconds is None else limit_seconds
            self._heart.beat(step, phase, limit)

    def step_took(self, seconds: float) -> None:
        self._recent.append(seconds)
