"""Save and load a run's state with torch.distributed.checkpoint.

A checkpoint is complete when its folder has its final name and holds the marker: the marker is written last, and
everything is on disk before the rename. `state.json` holds what is not a tensor: the step and what made it.
"""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from shardwise.errors import CheckpointError
from shardwise.runs import RunFolder
from shardwise.training.engines.protocol import Engine

MARKER = "complete"


def save(run: RunFolder, engine: Engine, step: int, facts: dict[str, Any], keep: int) -> tuple[Path, int]:
    """Write checkpoints/step-N (collective). Returns its folder and size in bytes on disk.

    Raises CheckpointError when it cannot be written; older checkpoints are untouched then.
    """
    final = run.checkpoint_path(step)
    work = final.with_name(final.name + ".writing")
    lead = engine.ranks.rank == 0
    try:
        if lead:
            shutil.rmtree(work, ignore_errors=True)
            work.mkdir(parents=True)
        _barrier(engine)
        dcp.save(_flat(engine.state()), checkpoint_id=str(work), no_dist=engine.ranks.world_size == 1)
        torch.save(torch.get_rng_state(), work / f"random-{engine.ranks.rank}.pt")
        _barrier(engine)
        if lead:
            (work / "state.json").write_text(json.dumps({"step": step, **facts}, indent=1))
            for file in work.iterdir():
                _sync(file)
            (work / MARKER).write_text("")
            _sync(work / MARKER)
            if final.exists():
                shutil.rmtree(final)
            work.rename(final)
            _sync(final.parent)
            for old in run.checkpoints()[:-keep]:
                shutil.rmtree(old.path)
    except (OSError, dcp.api.CheckpointException) as problem:
        if lead:
            shutil.rmtree(work, ignore_errors=True)
        raise CheckpointError(
            f"checkpoint of step {step} could not be written to {final}",
            str(problem).splitlines()[0] if str(problem) else type(problem).__name__,
            "free some space, then continue with --resume; older checkpoints are intact",
        ) from None
    _barrier(engine)
    return final, sum(f.stat().st_size for f in final.iterdir())


def load(folder: Path, engine: Engine) -> dict[str, Any]:
    """Fill the engine from a checkpoint (collective). Returns the content of state.json."""
    if not (folder / MARKER).is_file():
        raise CheckpointError(
            f"checkpoint {folder} is incomplete", "it has no marker file", "resume from an older one"
        )
    state = engine.state()
    flat = _flat(state)
    try:
        dcp.load(flat, checkpoint_id=str(folder), no_dist=engine.ranks.world_size == 1)
    except (OSError, KeyError, dcp.api.CheckpointException) as problem:
        raise CheckpointError(
            f"checkpoint {folder} cannot be read",
            str(problem).splitlines()[0] if str(problem) else type(problem).__name__,
            "it was written by another recipe or is damaged; delete it to resume from an older one",
        ) from None
    engine.load_state(_nested(flat))
    random = folder / f"random-{engine.ranks.rank}.pt"
    if random.is_file():
        torch.set_rng_state(torch.load(random, weights_only=True))
    facts: dict[str, Any] = json.loads((folder / "state.json").read_text())
    return facts


# Parameter names contain dots, so the levels are joined by a character that names do not have.
_JOIN = "|"


def _flat(state: dict[str, Any]) -> dict[str, Any]:
    flat = {f"weights{_JOIN}{name}": value for name, value in state["weights"].items()}
    for name, entries in state["optimizer"].items():
        flat.update({f"optimizer{_JOIN}{name}{_JOIN}{key}": value for key, value in entries.items()})
    return flat


def _nested(flat: dict[str, Any]) -> dict[str, Any]:
    state: dict[str, Any] = {"weights": {}, "optimizer": {}}
    for key, value in flat.items():
        kind, name, *entry = key.split(_JOIN)
        if kind == "weights":
            state["weights"][name] = value
        else:
            state["optimizer"].setdefault(name, {})[entry[0]] = value
    return state


def _barrier(engine: Engine) -> None:
    if engine.ranks.world_size > 1:
        dist.barrier()


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
