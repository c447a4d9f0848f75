"""Take a saved state back, whatever engine and however many ranks wrote it."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from shardwise.errors import CheckpointError
from shardwise.runs.checkpoints import INDEX, facts_of
from shardwise.runs.jsonfile import read_json
from shardwise.training.checkpoint.pieces import Reader, flatten, unflatten
from shardwise.training.checkpoint.save import RANDOM
from shardwise.training.engines.protocol import Engine


def load(folder: Path, engine: Engine) -> dict[str, Any]:
    """Fill the engine from a checkpoint (collective). Returns the content of its state.json.

    Random states come back where the number of ranks is the same. Raises CheckpointError when the folder
    holds another model's or another optimizer's state.
    """
    facts = facts_of(folder)
    index = read_json(folder / INDEX)
    if index is None or index.get("format") != 1:
        raise CheckpointError(
            f"checkpoint {folder} cannot be read",
            f"{INDEX} is missing, broken or of another format",
            "delete it to resume from an older one",
        )
    reader = Reader(folder, index)
    flat = flatten(engine.state())
    _same_keys(reader, flat, folder)
    for key in flat:
        flat[key] = _taken(reader, key, flat[key])
    engine.load_state(unflatten(flat))
    _load_random(folder, engine, facts)
    return facts


def _taken(reader: Reader, key: str, target: Any) -> Any:
    """The saved value in the kind that this engine keeps it in: tensors in place, numbers as they are."""
    if isinstance(target, torch.Tensor):
        if key in reader.tensors:
            reader.fill(key, target)
        else:
            target.fill_(reader.values[key])
        return target
    if key in reader.values:
        return reader.values[key]
    return type(target)(reader.whole(key).item())


def _same_keys(reader: Reader, flat: Mapping[str, Any], folder: Path) -> None:
    missing, surplus = sorted(flat.keys() - reader.keys()), sorted(reader.keys() - flat.keys())
    if not missing and not surplus:
        return
    names = [f"{k.replace('|', ' ')} is not in it" for k in missing[:2]]
    names += [f"{k.replace('|', ' ')} is unknown here" for k in surplus[:2]]
    raise CheckpointError(
        f"checkpoint {folder} does not fit this recipe",
        f"{len(missing) + len(surplus)} names differ: {'; '.join(names)}",
        "resume with the method, adapter and optimizer that it was written by",
    )


def _load_random(folder: Path, engine: Engine, facts: Mapping[str, Any]) -> None:
    file = folder / f"rank-{engine.ranks.rank}.safetensors"
    if facts.get("world_size") != engine.ranks.world_size or not file.is_file():
        if engine.ranks.rank == 0:
            print(
                f"random states start anew: {facts.get('world_size')} ranks saved, "
                f"{engine.ranks.world_size} go on (only dropout uses them)",
                file=sys.stderr,
                flush=True,
            )
        return
    with safe_open(file, framework="pt") as opened:
        names = set(opened.keys())
        if f"{RANDOM}cpu" in names:
            torch.set_rng_state(opened.get_tensor(f"{RANDOM}cpu"))
        if f"{RANDOM}cuda" in names and torch.cuda.is_available():
            torch.cuda.set_rng_state(opened.get_tensor(f"{RANDOM}cuda"))
