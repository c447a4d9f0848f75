"""torch.compile per layer, on and off, side by side: `python benchmarks/compiled.py --model FOLDER`.

Two processes build the same engine from the same recipe, one with `training.compile: true`. They take the same steps
over rows packed otherwise each time, in turn, one step of one and then one of the other, so that whatever else uses
the machine meets both. Told: tokens per processor second after the first step, what the first step took (compilation
included), after how many tokens compiling has paid for itself, and the largest difference of a loss.
"""

# ruff: noqa: PLC0415

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
DOCUMENTS = 8  # of 60 to 250 tokens, packed into one micro-batch


def side(model: str, method: str, compiled: bool) -> None:
    """One of the two: a line with a step's number comes in, a line with what it took goes out."""
    import numpy as np
    import torch

    from shardwise.recipe import parse_recipe
    from shardwise.training.batches import pack_documents
    from shardwise.training.build import build_engine
    from shardwise.training.engines.protocol import Ranks
    from shardwise.training.model import ModelFolder

    recipe = parse_recipe(
        f"model: {model}\ndata: none\nmethod: {method}\noptimizer: {{learning_rate: 1e-4}}\n"
        f"training: {{max_steps: 99, micro_batch_size: {DOCUMENTS}, global_batch_size: {DOCUMENTS},\n"
        f"  precision: bf16, activation_checkpointing: none, compile: {str(compiled).lower()}}}\nengine: single\n"
    )
    torch.manual_seed(0)
    engine = build_engine(recipe, ModelFolder(Path(model), recipe), torch.device("cpu"), Ranks(), 1)
    for line in sys.stdin:
        draw = np.random.default_rng(int(line))
        documents = []
        for length in draw.integers(60, 250, DOCUMENTS):
            ids = draw.integers(5, 40_000, length).astype(np.int32)
            documents.append((ids, ids))
        batch = pack_documents(documents)
        wall, used = time.perf_counter(), _processor_seconds()
        loss = engine.forward(batch)
        engine.backward(loss, 1.0 / batch.trained_tokens, True)
        engine.step(1e-4, 1.0)
        took = {
            "cpu_seconds": _processor_seconds() - used,
            "seconds": time.perf_counter() - wall,
            "tokens": batch.tokens,
            "loss": float(loss) / batch.trained_tokens,
        }
        print(json.dumps(took), flush=True)


def _processor_seconds() -> float:
    """Of this process and of the compilers that it started and that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def measure(model: str, method: str, steps: int, cache: Path) -> dict[str, Any]:
    """Both sides over `steps` steps, in turn."""
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "1"}
    sides = {
        name: subprocess.Popen(
            [sys.executable, "-W", "ignore", __file__, "--model", model, "--side", name, "--method", method],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment,
        )
        for name in ("off", "on")
    }  # fmt: skip
    took: dict[str, list[dict[str, float]]] = {"off": [], "on": []}
    for step in range(steps):
        for name in ("off", "on") if step % 2 else ("on", "off"):
            process = sides[name]
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write(f"{step}\n")
            process.stdin.flush()
            line = process.stdout.readline()
            if not line:
                raise SystemExit(f"the side with compile {name} ended with exit code {process.wait()}")
            took[name].append(json.loads(line))
            print(method, name, step, line.strip(), file=sys.stderr, flush=True)
    for process in sides.values():
        assert process.stdin is not None
        process.stdin.close()
        process.wait()
    return summary(method, took)


def summary(method: str, took: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """Rates after the first step, and what the first took."""
    rates = {name: [s["tokens"] / s["cpu_seconds"] for s in found[1:]] for name, found in took.items()}
    ratios = [on / off for on, off in zip(rates["on"], rates["off"], strict=True)]
    off, on = statistics.median(rates["off"]), statistics.median(rates["on"])
    warm_up = took["on"][0]["cpu_seconds"] - took["off"][0]["cpu_seconds"]
    saved = 1 / off - 1 / on  # processor seconds per token
    return {
        "method": method,
        "tokens_per_cpu_second": {"off": off, "on": on},
        "ratio_median": statistics.median(ratios),
        "ratio_range": [min(ratios), max(ratios)],
        "first_step_cpu_seconds": {name: found[0]["cpu_seconds"] for name, found in took.items()},
        "first_step_seconds": {name: found[0]["seconds"] for name, found in took.items()},
        "pays_after_tokens": warm_up / saved if saved > 0 else None,
        "largest_loss_difference": max(
            abs(a["loss"] - b["loss"]) for a, b in zip(took["off"], took["on"], strict=True)
        ),
        "steps": took,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--methods", nargs="*", default=["lora", "full"], choices=["lora", "full"])
    parser.add_argument("--method", help=argparse.SUPPRESS)
    parser.add_argument("--side", choices=["off", "on"], help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.side:
        side(args.model, args.method, args.side == "on")
        return
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as cache:
        for method in args.methods:
            found.append(measure(args.model, method, args.steps, Path(cache) / method))
            print(json.dumps({k: v for k, v in found[-1].items() if k != "steps"}), flush=True)
            if args.out:
                args.out.write_text(json.dumps(record(args.model, found), indent=1) + "\n")


def record(model: str, found: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "kind": "compiled",
        "command": "python benchmarks/compiled.py --model FOLDER",
        "date": date.today().isoformat(),
        "platform": platform.platform(),
        "torch": version("torch"),
        "model": Path(model).name,
        "threads": 1,
        "methods": found,
    }


if __name__ == "__main__":
    main()
