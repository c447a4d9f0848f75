"""One of three ranks: update rules on shards against the same rules on whole tensors. Writes to argv[1]."""

import json
from pathlib import Path

import torch
import torch.distributed as dist

from shardwise.recipe.schema import Optimizer
from shardwise.training import leave
from shardwise.training.optimizers import Updater
from shardwise.training.shards import Shards

# Rows that do not divide by three, fewer rows than ranks, one row, three dimensions.
SHAPES = {
    "a.up_proj.weight": (97, 64),
    "a.norm.weight": (5,),
    "b.up_proj.weight": (2, 33),
    "b.down_proj.weight": (1, 8),
    "c.experts": (4, 6, 7),
    "lm_head.weight": (130, 64),
}
STEPS = 6


def main(words: list[str]) -> int:
    out = Path(words[0])
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    found = {}
    for name in ("adamw", "sgd", "adafactor", "muon"):
        section = Optimizer(name=name, weight_decay=0.1, momentum=0.9)  # type: ignore[arg-type]
        torch.manual_seed(0)
        whole = {n: torch.nn.Parameter(torch.randn(shape)) for n, shape in SHAPES.items()}

        def mine(tensor: torch.Tensor) -> torch.Tensor:
            parts = tensor.detach().chunk(world)
            return parts[rank].clone() if rank < len(parts) else tensor.new_empty(0, *tensor.shape[1:])

        split = {n: torch.nn.Parameter(mine(p)) for n, p in whole.items()}
        assert dist.group.WORLD is not None
        shards = Shards(dist.group.WORLD, torch.device("cpu"), {n: tuple(p.shape) for n, p in whole.items()})
        reference = Updater(list(whole.items()), section, 1e-2, accumulate=False)
        updater = Updater(list(split.items()), section, 1e-2, accumulate=False, shards=shards)
        norms = []
        for _ in range(STEPS):
            for n, shape in SHAPES.items():
                whole[n].grad = torch.randn(shape)
                split[n].grad = mine(whole[n].grad)
            norms.append((updater.step(1e-2, 1.0), reference.step(1e-2, 1.0)))
        worst = max(
            float((split[n].detach() - mine(whole[n])).abs().max()) if split[n].numel() else 0.0
            for n in SHAPES
        )
        found[name] = {"weights": worst, "norm": max(abs(a - b) / b for a, b in norms)}
    (out / f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    leave.run(main)
