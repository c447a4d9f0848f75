"""What the loop costs beside the model: `python benchmarks/loop_overhead.py`.

The product's own `train` (rows, order, meter, checks, events, progress) drives an engine that computes nothing but
one number, and the processor seconds of a step are printed: everything a bare hand-written loop would not spend.
With --model the same kernels are stepped by a bare loop (rows to tensors, forward, backward, update, nothing else)
on SmolLM2-sized LoRA batches, so that the share is told too; and a step whose storages are followed is timed beside
it, since on a CPU the first step of a run is, and of the others the one with the largest micro-batch.
"""

# ruff: noqa: PLC0415

import argparse
import json
import math
import os
import platform
import statistics
import tempfile
import time
from datetime import date
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")


class Hollow:
    """An engine of one weight; notes the processor's clock at every update."""

    name = "single"

    def __init__(self) -> None:
        import torch

        from shardwise.training.engines.protocol import Ranks

        self.torch, self.ranks, self.device = torch, Ranks(), torch.device("cpu")
        self.module = torch.nn.Module()
        self.module.model = torch.nn.Linear(1, 1, bias=False)
        self.clock: list[float] = []

    def forward(self, batch):
        return self.module.model.weight.sum() * 0 + 1.0

    def backward(self, loss, scale, last):
        self.module.model.weight.grad = self.torch.ones(1, 1)

    def step(self, learning_rate, max_grad_norm):
        self.module.model.weight.grad = None
        with self.torch.no_grad():
            self.module.model.weight += learning_rate
        self.clock.append(time.process_time())
        return 1.0

    def tensors(self):
        return {"weights": list(self.module.parameters())}

    def facts(self):
        return {"engine": self.name}


class Synthetic:
    """Rows of 60 to 250 tokens."""

    def __init__(self, count: int) -> None:
        import numpy as np

        draw = np.random.default_rng(0)
        self.docs = []
        for length in draw.integers(60, 250, count):
            ids = draw.integers(5, 40000, length).astype(np.int32)
            self.docs.append((ids, ids))
        self.lengths = np.array([len(ids) for ids, _ in self.docs])
        self.trained = self.lengths - 1
        self.sources = np.zeros(count, np.int64)

    def __len__(self) -> int:
        return len(self.docs)

    def row(self, i):
        return self.docs[i]

    def source(self, i):
        return ("synthetic", i + 1)


def bare_and_watched(model: Path, repeats: int) -> tuple[float, float, int]:
    """Processor seconds of a bare step and of a watched one, the fastest of each, and their tokens."""
    import torch

    from shardwise.recipe import parse_recipe
    from shardwise.training.batches import pack
    from shardwise.training.build import build_engine
    from shardwise.training.engines.protocol import Ranks
    from shardwise.training.meter import WATCHED_STEPS, Meter
    from shardwise.training.model import ModelFolder

    recipe = parse_recipe(
        f"model: {model}\ndata: none\nmethod: lora\noptimizer: {{learning_rate: 1e-4}}\n"
        "training: {max_steps: 9, micro_batch_size: 8, global_batch_size: 8, precision: bf16,\n"
        "  activation_checkpointing: none}\nengine: single\n"
    )
    engine = build_engine(recipe, ModelFolder(model, recipe), torch.device("cpu"), Ranks(), 1)
    rows, meter, best = Synthetic(8), Meter(engine), [float("inf"), float("inf")]
    bins = tuple((i,) for i in range(8))
    for _ in range(repeats):
        for watched in (0, 1):
            began = time.process_time()
            batch = pack(rows, bins)
            meter.watched_steps = WATCHED_STEPS * (1 - watched)
            with meter.step(batch.tokens):
                loss = engine.forward(meter.inputs(batch) if watched else batch)
                engine.backward(loss, 1.0 / batch.trained_tokens, True)
                engine.step(1e-4, 1.0)
            best[watched] = min(best[watched], time.process_time() - began)
            meter._largest_tokens = batch.tokens
    return best[0], best[1], batch.tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--model", type=Path, help="a model folder: time a bare loop over it too")
    args = parser.parse_args()
    steps = args.steps

    import types

    from shardwise.recipe import parse_recipe
    from shardwise.runs.create import create_run
    from shardwise.training import loop
    from shardwise.training.meter import Meter
    from shardwise.training.progress import Bar

    text = (
        "model: none\ndata: none\noptimizer: {learning_rate: 1e-4}\n"
        f"training: {{max_steps: {steps}, micro_batch_size: 4, global_batch_size: 4, precision: fp32}}\n"
        "evaluation: {every_steps: 0}\ncheckpoint: {every_steps: 0}\n"
    )
    recipe, engine, rows = parse_recipe(text), Hollow(), Synthetic(4 * steps)
    bins = [tuple((4 * s + i,) for i in range(4)) for s in range(steps)]
    order = types.SimpleNamespace(
        steps=steps,
        passes=lambda done: done / steps,
        position=lambda done: {},
        sequence_length=512,
        rows=rows,
        step=lambda s: bins[s],
        micro_batches=lambda s, rank, world, micro: (bins[s],),
        tokens=lambda s: int(sum(rows.lengths[i] for (i,) in bins[s])),
        trained_tokens=lambda s: int(sum(rows.trained[i] for (i,) in bins[s])),
    )
    loop.checkpoint = lambda *_, **__: None  # saving is timed by itself
    loop.FirstSteps = lambda *_: types.SimpleNamespace(
        before_update=lambda _: None, after_update=lambda _: ()
    )
    with tempfile.TemporaryDirectory() as folder:
        run = create_run(folder, "overhead", text, {})
        job = loop.Job(run, recipe, engine, rows, None, order, Meter(engine), loop.Stop())
        loop.train(job, 0, Bar(steps, 0, shown=True))
    cost = [b - a for a, b in zip(engine.clock, engine.clock[1:], strict=False)][2:]
    result = {
        "kind": "loop_overhead",
        "date": date.today().isoformat(),
        "platform": platform.platform(),
        "steps": steps,
        "cpu_seconds_per_step_median": statistics.median(cost),
        "cpu_seconds_per_step_range": [min(cost), max(cost)],
    }
    if args.model:
        bare, watched, tokens = bare_and_watched(args.model, 3)
        share = result["cpu_seconds_per_step_median"] / bare
        result |= {
            "bare_step_cpu_seconds": bare,
            "tokens": tokens,
            "share_of_a_step": share,
            "watched_step_cpu_seconds": watched,
            # of the steps after the first one is followed, and a second where the heaviest comes late
            "steps_from_which_below_2_percent": 1 + math.ceil((watched - bare) / bare / (0.02 - share)),
            "share_with_2_watched_of_100_steps": share + 0.02 * (watched - bare) / bare,
        }
    print(json.dumps(result, indent=1))
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
