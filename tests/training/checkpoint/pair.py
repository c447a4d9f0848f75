"""One of two ranks: every engine saves, goes on, loads and goes on again. `python pair.py FOLDER OUT.json`.

All engines in one pair of processes, so that torch and DeepSpeed are imported once.
"""

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1] / "engines"))
import toy

from shardwise.runs import RunFolder
from shardwise.training.build import build_engine
from shardwise.training.checkpoint.load import load
from shardwise.training.checkpoint.save import save
from shardwise.training.engines.protocol import Engine, Ranks
from shardwise.training.model import ModelFolder

RATE, NORM, SAVED, STEPS = 1e-3, 0.5, 3, 8
ENGINES: dict[str, dict[str, Any]] = {
    "ddp": {"name": "ddp"},
    "fsdp2": {"name": "fsdp2"},
    "zero2": {"name": "deepspeed", "deepspeed": {"zero_stage": 2}},
    "zero3": {"name": "deepspeed", "deepspeed": {"zero_stage": 3}},
}
CROSSINGS = (("fsdp2", "zero3"), ("zero3", "fsdp2"), ("ddp", "zero2"), ("zero2", "fsdp2"))


def build(name: str, folder: Path, ranks: Ranks) -> Engine:
    engine = ENGINES.get(name, {"name": "single"})
    recipe = toy.recipe(engine={**engine, "device": "cpu", "processes": ranks.world_size})
    model = ModelFolder(folder / "model", recipe)
    return build_engine(recipe, model, torch.device("cpu"), ranks, 4 // ranks.world_size)


def go_on(engine: Engine, run: RunFolder, step: int) -> dict[str, Any]:
    """Load a checkpoint and train from it: losses, and a digest of the weights at the end."""
    load(run.checkpoint_path(step), engine)
    trace = toy.train(engine, range(step, STEPS), RATE, NORM)
    return {"losses": trace.losses, "weights": bits(engine)}


def bits(engine: Engine) -> str:
    """Hash of the trained weights' bytes, on rank 0."""
    import hashlib

    found = hashlib.sha256()
    for name, tensor in sorted(engine.trained_weights()):
        found.update(name.encode() + tensor.contiguous().numpy().tobytes())
    return found.hexdigest()


def main(folder: Path, out: Path) -> None:
    ranks = Ranks(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("gloo")
    found: dict[str, Any] = {}
    for name in ENGINES:
        run = RunFolder(folder / name)
        engine = build(name, folder, ranks)
        toy.train(engine, range(SAVED), RATE, NORM)
        save(run, engine, SAVED, {"layout": engine.facts()}, keep=2)
        trace = toy.train(engine, range(SAVED, STEPS), RATE, NORM)
        found[name] = {"losses": trace.losses, "weights": bits(engine)}
        engine.close()
        engine = build(name, folder, ranks)
        found[f"{name} resumed"] = go_on(engine, run, SAVED)
        engine.close()
    for old, new in CROSSINGS:
        engine = build(new, folder, ranks)
        found[f"{old} to {new}"] = go_on(engine, RunFolder(folder / old), SAVED)
        engine.close()
    single = RunFolder(folder / "single")
    engine = build("fsdp2", folder, ranks)
    found["single to fsdp2"] = go_on(engine, single, SAVED)
    if ranks.rank == 0:
        out.write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]), Path(sys.argv[2]))
    except BaseException:
        traceback.print_exc()
        raise
