"""A run's saves, one at a time: at once, or written by a thread while training goes on.

In the background each rank copies its share into host memory, which is all that training waits for, and writes the
copy to its own file. The marker follows when every rank has said, with the loss of a step, that its file is on
the disk. A write that failed is told by the first step after it, on all ranks.
"""

import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from threading import Thread
from typing import Any

from shardwise.runs import RunFolder
from shardwise.training.checkpoint.save import Saved, Taken, finish, take, write
from shardwise.training.engines.protocol import Engine
from shardwise.units import format_bytes


@dataclass
class _Writing:
    """One save in the background. `stalled_seconds`: how long training has waited for it so far."""

    taken: Taken
    began: float
    stalled_seconds: float
    thread: Thread
    note: list[Any] = field(default_factory=list)


class Saver:
    """One rank's saves; all methods but `ended` are collective."""

    def __init__(self, run: RunFolder, engine: Engine, keep: int, background: bool) -> None:
        self.run, self.engine, self.keep, self.background = run, engine, keep, background
        self._writing: _Writing | None = None
        self._told = False

    @property
    def ended(self) -> bool:
        """Whether this rank has written its part of a save that is not published yet."""
        return self._writing is not None and not self._writing.thread.is_alive()

    def save(self, step: int, facts: Mapping[str, Any], wait: bool = False) -> None:
        """Begin to save, after the save before has ended; with `wait`, or without a background, end it too.

        Raises as `checkpoint.save.save`, for the save before as well.
        """
        self.collect()
        began = time.perf_counter()
        copy = self.background and not wait
        taken = take(self.run, self.engine, step, facts, self.keep, copy)
        if not taken.copied:
            if copy:
                self._tell("no host memory is free for a copy of the state: training waits for this save")
            self._record(finish(self.run, self.engine, taken, write(self.engine, taken)), began, None)
            return
        self._say_once(taken)
        note: list[Any] = []
        thread = Thread(target=lambda: note.append(write(self.engine, taken)), daemon=True, name="save")
        self._writing = _Writing(taken, began, time.perf_counter() - began, thread, note)
        thread.start()

    def collect(self) -> None:
        """Wait for the save that is being written, if there is one, and publish it. Raises as `save`."""
        writing, self._writing = self._writing, None
        if writing is None:
            return
        began = time.perf_counter()
        writing.thread.join()
        saved = finish(self.run, self.engine, writing.taken, writing.note[0])
        self._record(saved, writing.began, writing.stalled_seconds + time.perf_counter() - began)

    def _record(self, saved: Saved, began: float, stalled_seconds: float | None) -> None:
        """Rank 0 notes the checkpoint: `seconds` that training waited, `written_seconds` until it was there."""
        if self.engine.ranks.rank != 0:
            return
        written = time.perf_counter() - began
        self.run.event(
            "checkpoint",
            step=saved.step,
            path=str(saved.path),
            bytes=saved.bytes,
            seconds=written if stalled_seconds is None else stalled_seconds,
            written_seconds=written,
            removed=list(saved.removed),
        )

    def _say_once(self, taken: Taken) -> None:
        if self._told or self.engine.ranks.rank != 0:
            return
        self._told = True
        size = format_bytes(taken.bytes)
        print(
            f"checkpoints are written in the background, from a copy of {size} in host memory per rank",
            file=sys.stderr,
            flush=True,
        )

    def _tell(self, message: str) -> None:
        if self.engine.ranks.rank == 0:
            self.run.event("warning", message=message)
            print(f"warning: {message}", file=sys.stderr, flush=True)
