"""What rank 0 shows while training: a bar on a terminal, a line now and then elsewhere."""

import sys
import time

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from shardwise.units import format_bytes, format_seconds

LINE_EVERY_SECONDS = 10.0


class Bar:
    """Progress of a run on standard error."""

    def __init__(self, steps: int, done: int, shown: bool) -> None:
        self.steps, self.shown = steps, shown
        self.console = Console(stderr=True)
        self.live = shown and self.console.is_terminal
        self.started, self.first = time.monotonic(), done
        self.last_line = 0.0
        self.bar = Progress(
            TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
            BarColumn(bar_width=24),
            TextColumn("{task.description}"),
            TimeRemainingColumn(compact=True),
            console=self.console,
            disable=not self.live,
            transient=False,
        )
        self.task = self.bar.add_task("first step ...", total=steps, completed=done)
        if self.live:
            self.bar.start()

    def begin(self) -> None:
        """The first step begins: what came before, such as an evaluation, says nothing about the time left."""
        self.started = time.monotonic()

    def step(self, done: int, loss: float, tokens_per_second: float, peak_bytes: int | None) -> None:
        """`peak_bytes`: the run's highest moment so far, None where nothing has been measured yet."""
        peak = f"peak {format_bytes(peak_bytes)}  " if peak_bytes else ""
        text = f"loss {loss:.3f}  {tokens_per_second:,.0f} tok/s  {peak}left"
        if self.live:
            self.bar.update(self.task, completed=done, description=text)
            return
        now = time.monotonic()
        if self.shown and (now - self.last_line >= LINE_EVERY_SECONDS or done == self.steps):
            self.last_line = now
            left = (now - self.started) / max(1, done - self.first) * (self.steps - done)
            print(f"step {done}/{self.steps}  {text} {format_seconds(left)}", file=sys.stderr, flush=True)

    def say(self, text: str) -> None:
        if self.shown:
            self.console.print(text, highlight=False, markup=False)

    def close(self) -> None:
        if self.live:
            self.bar.stop()
