"""Write a run's state: every rank its own file, published together or not at all.

Safetensors with an index of our own rather than torch.distributed.checkpoint: its `.metadata` is a pickle, so
that reading a checkpoint made by somebody else runs their code; it writes over what is there; and nothing
checks its content. Here the format holds no code, and each file's SHA-256 is known before it is published.
"""

import errno
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file

from shardwise.errors import CheckpointError, DiskFullError, DivergedError
from shardwise.runs import RunFolder
from shardwise.runs.checkpoints import INDEX, STATE, WRITING, flush, prune, publish, sha256
from shardwise.training.checkpoint.pieces import Box, add_pieces, flatten, index_of, share
from shardwise.training.engines.protocol import Engine
from shardwise.units import format_bytes

RANDOM = "random|"  # keys of random states in a rank's file


@dataclass(frozen=True)
class Saved:
    """A published checkpoint of `step`, its size on disk over all ranks, and the steps that made room."""

    step: int
    path: Path
    bytes: int
    removed: tuple[int, ...]


@dataclass(frozen=True)
class _Note:
    """What one rank tells the others between two parts of a save."""

    problem: str = ""
    full: bool = False
    non_finite: bool = False
    bytes: int = 0
    digest: str = ""
    boxes: Any = None
    removed: tuple[int, ...] = ()
    room: bool = True  # host memory for a copy


@dataclass(frozen=True)
class Taken:
    """One rank's part of a state, on its way to `work`. `copied`: training may go on while it is written."""

    step: int
    final: Path
    work: Path
    keep: int
    bytes: int  # of this rank
    total_bytes: int
    tensors: Mapping[str, torch.Tensor]
    boxes: Mapping[str, Any]
    index: dict[str, Any]
    state: Mapping[str, Any]
    copied: bool


def save(run: RunFolder, engine: Engine, step: int, facts: Mapping[str, Any], keep: int) -> Saved:
    """Write checkpoints/step-N (collective). `facts` is what state.json holds beside the step.

    Raises DiskFullError or CheckpointError when it cannot be written, and DivergedError when the state holds
    NaN or infinity, on all ranks alike; older checkpoints are untouched then.
    """
    taken = take(run, engine, step, facts, keep)
    return finish(run, engine, taken, write(engine, taken))


def take(
    run: RunFolder, engine: Engine, step: int, facts: Mapping[str, Any], keep: int, copy: bool = False
) -> Taken:
    """The first part (collective): look at the state and the disk, and make the folder. Raises as `save`.

    `copy`: into host memory, so that the state may change meanwhile; left out, on all ranks alike, where one of
    them has no room for it.
    """
    final = run.checkpoint_path(step)
    work = final.with_name(final.name + WRITING)
    rank, world = engine.ranks.rank, engine.ranks.world_size
    flat, mine, bad = part_of_state(engine)
    tensors = {key: local for key, (_, local) in mine.items()}
    size = sum(t.numel() * t.element_size() for t in tensors.values())
    room = copy and _room(size)
    notes = _exchange(engine, _Note(bytes=size, problem=bad, non_finite=bool(bad), room=room))
    _raise(notes, final, step)
    total = sum(n.bytes for n in notes)
    _raise(_exchange(engine, _prepare(work, total) if rank == 0 else _Note()), final, step)
    copied = all(n.room for n in notes)
    if copied:
        tensors = {key: t.detach().to("cpu", copy=True) for key, t in tensors.items()}
    boxes = {k: {"offset": list(b.offset), "shape": list(b.shape)} for k, (b, _) in mine.items()}
    return Taken(
        step,
        final,
        work,
        keep,
        size,
        total,
        {**tensors, **_random_states()},
        boxes,
        index_of((), flat),
        {"step": step, "world_size": world, **facts},
        copied,
    )


def part_of_state(engine: Engine) -> tuple[dict[str, Any], dict[str, tuple[Box, torch.Tensor]], str]:
    """The state as this rank sees it, the part that it writes, and of that the first key with NaN or infinity."""
    flat = flatten(engine.state())
    mine = share(flat, engine.ranks.rank, engine.ranks.world_size)
    bad = next((k for k, (_, t) in mine.items() if t.is_floating_point() and not _finite(t)), "")
    return flat, mine, bad


def write(engine: Engine, taken: Taken) -> _Note:
    """The second part: this rank's own file. Needs no other rank and raises nothing: safe in a thread."""
    return _write(taken.work / f"rank-{engine.ranks.rank}.safetensors", taken.tensors)


def finish(run: RunFolder, engine: Engine, taken: Taken, note: _Note) -> Saved:
    """The last part (collective): when every rank has written its file, publish them. Raises as `save`."""
    lead = engine.ranks.rank == 0
    notes = _exchange(engine, replace(note, boxes=taken.boxes))
    if lead and any(n.problem for n in notes):
        shutil.rmtree(taken.work, ignore_errors=True)
    _raise(notes, taken.final, taken.step)
    if lead:
        files = [(f"rank-{r}.safetensors", n) for r, n in enumerate(notes)]
        add_pieces(taken.index, [(file, n.boxes) for file, n in files])
        note = _publish(run, taken, {file: n.digest for file, n in files})
    notes = _exchange(engine, note if lead else _Note())
    _raise(notes, taken.final, taken.step)
    return Saved(taken.step, taken.final, taken.total_bytes, notes[0].removed)


def _room(size: int) -> bool:
    """Whether this machine has memory for a copy of what its ranks hold; half of what is free stays free."""
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return 2 * size * ranks_here < psutil.virtual_memory().available


def _prepare(work: Path, needed_bytes: int) -> _Note:
    """An empty folder on a disk with room for what is to come."""
    try:
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        free = shutil.disk_usage(work).free
        if free < needed_bytes:
            work.rmdir()
            text = f"it needs {format_bytes(needed_bytes)}, {format_bytes(free)} are free"
            return _Note(problem=text, full=True)
    except OSError as problem:
        return _note_of(problem)
    return _Note()


def _write(path: Path, tensors: Mapping[str, torch.Tensor]) -> _Note:
    """One rank's file, on the disk, with its checksum."""
    try:
        save_file({key: t.detach().contiguous() for key, t in tensors.items()}, path)
        flush(path)
        return _Note(bytes=path.stat().st_size, digest=sha256(path))
    except (OSError, SafetensorError) as problem:
        return _note_of(problem)


def _publish(run: RunFolder, taken: Taken, digests: Mapping[str, str]) -> _Note:
    try:
        (taken.work / INDEX).write_text(json.dumps(taken.index))
        (taken.work / STATE).write_text(json.dumps(taken.state, indent=1))
        publish(taken.work, taken.final, digests)
    except OSError as problem:
        shutil.rmtree(taken.work, ignore_errors=True)
        return _note_of(problem)
    try:
        return _Note(removed=tuple(prune(run, taken.keep)))
    except OSError as problem:
        return _note_of(problem)


def _random_states() -> dict[str, torch.Tensor]:
    states = {f"{RANDOM}cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states[f"{RANDOM}cuda"] = torch.cuda.get_rng_state()
    return states


def _finite(tensor: torch.Tensor) -> bool:
    return bool(torch.isfinite(tensor).all())


def _note_of(problem: Exception) -> _Note:
    text = str(problem).splitlines()[0] if str(problem) else type(problem).__name__
    code = getattr(problem, "errno", None)
    return _Note(text, full=code in (errno.ENOSPC, errno.EDQUOT) or "No space left" in text)


def _exchange(engine: Engine, note: _Note) -> list[_Note]:
    """Every rank's note on every rank: they go on together or fail together."""
    if engine.ranks.world_size == 1:
        return [note]
    notes: list[Any] = [None] * engine.ranks.world_size
    dist.all_gather_object(notes, note)
    return notes


def _raise(notes: list[_Note], final: Path, step: int) -> None:
    rank, note = next(((r, n) for r, n in enumerate(notes) if n.problem), (0, None))
    if note is None:
        return
    if note.non_finite:
        raise DivergedError(
            f"after step {step}, {note.problem.replace('|', ' ')} holds NaN or infinity (rank {rank})",
            "it was not saved; older checkpoints are intact",
            "lower optimizer.learning_rate and resume from the last checkpoint",
        )
    kind = DiskFullError if note.full else CheckpointError
    raise kind(
        f"checkpoint of step {step} could not be written to {final}"
        + (": the disk is full" if note.full else ""),
        f"{note.problem} (rank {rank})",
        "make room there; older checkpoints are intact: continue with shardwise train --resume "
        + str(final.parent.parent),
    )
