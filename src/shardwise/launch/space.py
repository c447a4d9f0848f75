"""Is there room on the disk for what a run will leave there? Asked before the run."""

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shardwise.errors import UsageError
from shardwise.estimate.memory.states import counts_of
from shardwise.plan.saving import checkpoint_bytes
from shardwise.units import format_bytes

if TYPE_CHECKING:
    from shardwise.launch.job import Job


@dataclass(frozen=True)
class Space:
    """What a run will leave on a disk at its peak, and what is free there."""

    checkpoint_bytes: int
    checkpoints: int  # at one time: the `keep` latest, the best one, and one being written
    needed_bytes: int  # all of them and the result
    free_bytes: int

    def __str__(self) -> str:
        return (
            f"{format_bytes(self.checkpoint_bytes)} a checkpoint, at most {self.checkpoints} at a time: "
            f"{format_bytes(self.needed_bytes)} with the result; {format_bytes(self.free_bytes)} are free"
        )


def space(job: "Job", folder: Path) -> Space:
    """Disk space of a decided run that writes below `folder`."""
    recipe, stack = job.recipe, job.plan.stack
    every = recipe.checkpoint.every_steps
    steps = job.plan.steps
    saves = max(1, -(-steps // every)) if isinstance(every, int) and every and steps else 1
    count = min(saves, recipe.checkpoint.keep + 1) + (1 if saves > 1 else 0)
    each = checkpoint_bytes(job.shape, stack)
    result = counts_of(job.shape, stack).trained * (2 if recipe.training.precision == "bf16" else 4)
    return Space(each, count, count * each + result, shutil.disk_usage(existing(folder)).free)


def require_space(job: "Job", folder: Path) -> None:
    """Raise UsageError, with both numbers, when `folder`'s disk has no room for what the run will leave there."""
    found = space(job, folder)
    if found.free_bytes < found.needed_bytes:
        raise UsageError(
            f"the run needs {format_bytes(found.needed_bytes)} in '{folder}', "
            f"{format_bytes(found.free_bytes)} are free",
            f"{found.checkpoints} checkpoints of {format_bytes(found.checkpoint_bytes)} at a time, and the result",
            "make room, choose another disk with --set run.folder=PATH, or set checkpoint.keep: 1 and "
            "checkpoint.every_steps: 0",
        )


def require_writable(folder: Path) -> None:
    """Raise UsageError when nothing can be written in `folder`; costs one small file, for a moment."""
    where = existing(folder)
    try:
        with tempfile.NamedTemporaryFile(dir=where, prefix=".shardwise-") as file:
            file.write(b"1")
            file.flush()
    except OSError as problem:
        raise UsageError(
            f"nothing can be written in '{where}'",
            problem.strerror or str(problem),
            "choose another place with --set run.folder=PATH",
        ) from None


def existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that exists."""
    folder = folder.absolute()
    return next(p for p in (folder, *folder.parents) if p.exists())
