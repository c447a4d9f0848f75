"""One rank of one world size: every engine saves, goes on, loads what the others saved and goes on again.

`python layouts.py FOLDER`. Jobs of 1, 2 and 4 ranks run at the same time, each with all engines in one set of
processes, so that torch and DeepSpeed are imported once; they wait for each other's checkpoints.
"""

import json
import os
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1] / "engines"))
import toy

from shardwise.runs import RunFolder
from shardwise.training import leave
from shardwise.training.build import build_engine
from shardwise.training.checkpoint.load import load
from shardwise.training.checkpoint.save import save
from shardwise.training.engines.protocol import Engine, Ranks
from shardwise.training.model import ModelFolder

RATE, NORM, SAVED, STEPS = 1e-3, 0.5, 3, 13
WORLDS = (1, 2, 4)
ENGINES: dict[str, dict[str, Any]] = {
    "ddp": {"name": "ddp"},
    "fsdp2": {"name": "fsdp2"},
    "zero1": {"name": "deepspeed", "deepspeed": {"zero_stage": 1}},
    "zero2": {"name": "deepspeed", "deepspeed": {"zero_stage": 2}},
    "zero3": {"name": "deepspeed", "deepspeed": {"zero_stage": 3}},
}
Layout = tuple[str, int]
LAYOUTS: list[Layout] = [("single", 1), *((engine, world) for engine in ENGINES for world in WORLDS)]


def name_of(layout: Layout) -> str:
    return f"{layout[0]} on {layout[1]}"


def crossings(every: bool = False) -> Iterator[tuple[Layout, Layout]]:
    """(saved by, gone on by): each engine between all world sizes, and each engine with each other one.

    `every`: all 16 x 15 pairs of layouts.
    """
    names = ["single", *ENGINES]
    for old in LAYOUTS:
        for new in LAYOUTS:
            if old == new:
                continue
            if every or old[0] == new[0]:
                yield old, new
            elif "single" in (old[0], new[0]):
                if 2 in (old[1], new[1]):
                    yield old, new
            else:  # which world sizes: another pair of them for each pair of engines
                turn = names.index(old[0]) * len(names) + names.index(new[0])
                if (old[1], new[1]) == (WORLDS[turn % 3], WORLDS[turn // 3 % 3]):
                    yield old, new


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


def discarded(engine: Engine) -> None:
    """A step whose gradients are thrown away, as after a loss that is not finite: it must leave no trace."""
    batches = toy.micro_batches(99, engine.ranks.world_size, engine.ranks.rank)
    for i, batch in enumerate(batches):
        engine.backward(engine.forward(batch), float("nan"), last=i == len(batches) - 1)
    engine.discard()


def undisturbed(layout: Layout, folder: Path, ranks: Ranks) -> dict[str, Any]:
    """Train, save on the way, and end. The folder gets the checkpoint."""
    engine = build(layout[0], folder, ranks)
    toy.train(engine, range(SAVED), RATE, NORM)
    save(RunFolder(folder / name_of(layout)), engine, SAVED, {"layout": engine.facts()}, keep=2)
    trace = toy.train(engine, range(SAVED, STEPS), RATE, NORM)
    found = {"losses": trace.losses, "weights": bits(engine)}
    engine.close()
    return found


def main(words: list[str]) -> int:
    folder = Path(words[0])
    ranks = Ranks(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_RANK"]))
    world = ranks.world_size
    dist.init_process_group("gloo", timeout=timedelta(minutes=5))
    found: dict[str, Any] = {}
    mine = [layout for layout in LAYOUTS if layout[1] == world]
    for layout in mine:
        found[name_of(layout)] = undisturbed(layout, folder, ranks)
    (folder / f"saved-{world}-{ranks.rank}").touch()
    while len(list(folder.glob("saved-*"))) < sum(WORLDS):
        time.sleep(0.05)
    pairs = list(crossings(every=os.environ.get("SHARDWISE_TEST_LAYOUTS") == "all"))
    for layout in mine:
        for old in [layout, *(old for old, new in pairs if new == layout)]:
            engine = build(layout[0], folder, ranks)
            if old == layout:
                discarded(engine)
            found[f"{name_of(old)} -> {name_of(layout)}"] = go_on(
                engine, RunFolder(folder / name_of(old)), SAVED
            )
            engine.close()
    if ranks.rank == 0:
        (folder / f"out-{world}.json").write_text(json.dumps(found))
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    leave.run(main)
