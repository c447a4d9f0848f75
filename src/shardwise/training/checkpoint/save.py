"""Write a run's state: every rank its own file, published together or not at all.

Safetensors with an index of our own rather than torch.distributed.checkpoint: its `.metadata` is a pickle, so
that reading a checkpoint made by somebody else runs their code; it writes over what is there; and nothing
checks its content. Here the format holds no code, and each file's SHA-256 is known before it is published.
"""

import errno
import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file

from shardwise.errors import CheckpointError, DiskFullError, DivergedError
from shardwise.runs import RunFolder
from shardwise.runs.checkpoints import INDEX, STATE, WRITING, flush, prune, publish, sha256
from shardwise.training.checkpoint.pieces import flatten, index_of, share
from shardwise.training.engines.protocol import Engine
from shardwise.units import format_bytes

RANDOM = "random|"  # keys of random states in a rank's file


@dataclass(frozen=True)
class Saved:
    """A published checkpoint, its size on disk over all ranks, and the steps whose checkpoints made room."""

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


def save(run: RunFolder, engine: Engine, step: int, facts: Mapping[str, Any], keep: int) -> Saved:
    """Write checkpoints/step-N (collective). `facts` is what state.json holds beside the step.

    Raises DiskFullError or CheckpointError when it cannot be written, and DivergedError when the state holds
    NaN or infinity, on all ranks alike; older checkpoints are untouched then.
    """
    final = run.checkpoint_path(step)
    work = final.with_name(final.name + WRITING)
    rank, world = engine.ranks.rank, engine.ranks.world_size
    lead = rank == 0
    flat = flatten(engine.state())
    mine = share(flat, rank, world)
    tensors = {key: local for key, (_, local) in mine.items()}
    size = sum(t.numel() * t.element_size() for t in tensors.values())
    bad = next((k for k, t in tensors.items() if t.is_floating_point() and not _finite(t)), "")
    notes = _exchange(engine, _Note(bytes=size, problem=bad, non_finite=bool(bad)))
    _raise(notes, final, step)
    total = sum(n.bytes for n in notes)

    _raise(_exchange(engine, _prepare(work, total) if lead else _Note()), final, step)
    file = f"rank-{rank}.safetensors"
    note = _write(work / file, {**tensors, **_random_states()})
    boxes = {k: {"offset": list(b.offset), "shape": list(b.shape)} for k, (b, _) in mine.items()}
    notes = _exchange(engine, _Note(**{**note.__dict__, "boxes": boxes}))
    if lead and any(n.problem for n in notes):
        shutil.rmtree(work, ignore_errors=True)
    _raise(notes, final, step)

    if lead:
        index = index_of([(f"rank-{r}.safetensors", n.boxes) for r, n in enumerate(notes)], flat)
        digests = {f"rank-{r}.safetensors": n.digest for r, n in enumerate(notes)}
        note = _publish(run, work, final, index, {"step": step, "world_size": world, **facts}, digests, keep)
    notes = _exchange(engine, note if lead else _Note())
    _raise(notes, final, step)
    return Saved(final, total, notes[0].removed)


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


def _publish(
    run: RunFolder,
    work: Path,
    final: Path,
    index: Mapping[str, Any],
    state: Mapping[str, Any],
    digests: Mapping[str, str],
    keep: int,
) -> _Note:
    try:
        (work / INDEX).write_text(json.dumps(index))
        (work / STATE).write_text(json.dumps(state, indent=1))
        publish(work, final, digests)
    except OSError as problem:
        shutil.rmtree(work, ignore_errors=True)
        return _note_of(problem)
    try:
        return _Note(removed=tuple(prune(run, keep)))
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
