"""One of four ranks of HSDP, two replicas of two shards: 20 steps of each optimizer, compared with `single`."""

import json
import os
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import toy

from shardwise.runs import RunFolder
from shardwise.training import leave
from shardwise.training.build import build_engine
from shardwise.training.checkpoint.load import load
from shardwise.training.checkpoint.save import save
from shardwise.training.engines.protocol import Engine, Ranks
from shardwise.training.model import ModelFolder

STEPS = 20
CASES: dict[str, dict[str, Any]] = {
    "adamw": {},
    "muon": {"optimizer": {"name": "muon"}},
}


def build(name: str, engine: dict[str, Any], folder: Path, ranks: Ranks) -> Engine:
    recipe = toy.recipe(**CASES[name], engine=engine)
    return build_engine(
        recipe, ModelFolder(folder, recipe), torch.device("cpu"), ranks, 4 // ranks.world_size
    )


def run(name: str, root: Path, ranks: Ranks) -> dict[str, Any]:
    hybrid = {"name": "fsdp2", "processes": 4, "fsdp2": {"dp_replicate": 2}}
    engine = build(name, hybrid, root / "model", ranks)
    trace = toy.train(engine, range(STEPS), 1e-3, 0.5)
    weights, after = toy.weights(engine), toy.evaluate(engine)
    path = save(RunFolder(root / name), engine, STEPS, {}, keep=1).path
    again = build(name, hybrid, root / "model", ranks)
    load(path, again)
    reloaded = toy.evaluate(again)
    following = [toy.train(e, range(STEPS, STEPS + 2), 1e-3, 0.5).losses[1] for e in (engine, again)]
    if ranks.rank:
        return {}
    single = build(name, {"name": "single", "processes": 1}, root / "model", Ranks())
    expected = toy.train(single, range(STEPS), 1e-3, 0.5)
    return {
        "loss": max(abs(a - b) / b for a, b in zip(trace.losses, expected.losses, strict=True)),
        "norm": max(abs(a - b) / b for a, b in zip(trace.norms, expected.norms, strict=True)),
        "weights": toy.distance(weights, toy.weights(single)),
        "reloaded": abs(reloaded - after) / after,
        "resumed": abs(following[0] - following[1]) / following[0],
        "facts": engine.facts(),
    }


def main(words: list[str]) -> int:
    root = Path(words[0])
    warnings.simplefilter("ignore")
    ranks = Ranks(*(int(os.environ[k]) for k in ("RANK", "WORLD_SIZE", "LOCAL_RANK")))
    dist.init_process_group("gloo")
    if ranks.rank == 0:
        toy.make_model(root / "model")
    dist.barrier()
    found = {name: run(name, root, ranks) for name in CASES}
    if ranks.rank == 0:
        (root / "found.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    leave.run(main)
