"""Measure host memory while two ranks load a model: does a node hold one copy of the weights, or one per rank?

    python benchmarks/load_memory.py [--layers 24] [--hidden 1024] [--precision fp32] [--only NAME] [--out FILE]

A random Llama (bf16) is written to a temporary folder; each engine builds LoRA on it in two processes. In fp32 every
weight has to be converted, so that no engine can do with views of the mapped file, which transformers gives for
weights of the file's own dtype on a CPU. What counts is
memory of the process's own (RssAnon in /proc, sampled every 2 ms) above what it was before the build; pages of the
mapped files are shared by all ranks and can be dropped, and are told beside it. Linux only.
"""

import argparse
import json
import os
import sys
import tempfile
import threading
import time
from datetime import date
from pathlib import Path
from typing import Any

TARGET = Path(__file__).parents[1] / "measurements" / "load-memory-2-ranks.json"
ZERO3 = {"zero_stage": 3, "param_persistence_threshold": 0, "max_live_parameters": 1_000_000}
SMALL = {"reduce_bucket_size": 1_000_000, "prefetch_bucket_size": 1_000_000}
ENGINES: dict[str, dict[str, Any]] = {
    "ddp": {"name": "ddp"},
    "zero-2": {"name": "deepspeed", "deepspeed": {"zero_stage": 2, **SMALL}},
    "zero-3": {"name": "deepspeed", "deepspeed": {**ZERO3, **SMALL}},
    "fsdp2": {"name": "fsdp2"},
}


class Sampler(threading.Thread):
    """The largest RssAnon and RssFile of this process while it runs, bytes."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak = resident()
        self.going = True

    def run(self) -> None:
        while self.going:
            self.peak = {key: max(value, self.peak[key]) for key, value in resident().items()}
            time.sleep(0.002)


def resident() -> dict[str, int]:
    fields = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return {key: int(fields[key].split()[0]) * 1024 for key in ("RssAnon", "RssFile")}


def rank(name: str, model: Path, out: Path) -> None:
    """One rank; writes what it measured."""
    import gc

    import torch
    import torch.distributed as dist

    from shardwise.recipe import Recipe
    from shardwise.training.build import build_engine
    from shardwise.training.engines.protocol import Ranks
    from shardwise.training.model import ModelFolder

    ranks = Ranks(*(int(os.environ[k]) for k in ("RANK", "WORLD_SIZE", "LOCAL_RANK")))
    dist.init_process_group("gloo")
    recipe = Recipe.model_validate(
        {
            "model": {"source": str(model)},
            "data": {"train": [{"path": "none"}]},
            "method": "lora",
            "optimizer": {"learning_rate": 1e-4},
            "training": {
                "micro_batch_size": 1,
                "global_batch_size": ranks.world_size,
                "precision": os.environ["LOAD_PRECISION"],
                "activation_checkpointing": "none",
                "loss": "chunked",
            },
            "engine": {"device": "cpu", "processes": ranks.world_size, **ENGINES[name]},
        }
    )
    if name.startswith("zero"):
        import deepspeed  # noqa: F401  imports are no part of loading
    import shardwise.training.adapters.lora  # noqa: F401

    before = resident()
    sampler = Sampler()
    sampler.start()
    engine = build_engine(recipe, ModelFolder(model, recipe), torch.device("cpu"), ranks, 1)
    sampler.going = False
    sampler.join()
    gc.collect()
    after = resident()
    (out / f"{ranks.rank}.json").write_text(
        json.dumps(
            {
                "peak_own_bytes": sampler.peak["RssAnon"] - before["RssAnon"],
                "held_own_bytes": after["RssAnon"] - before["RssAnon"],
                "peak_file_bytes": sampler.peak["RssFile"] - before["RssFile"],
            }
        )
    )
    dist.barrier()
    engine.close()
    dist.destroy_process_group()


def write_model(folder: Path, layers: int, hidden: int) -> int:
    """A Llama of random bits, one file per layer so that writing holds little. Returns its bytes."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        vocab_size=32_000, hidden_size=hidden, intermediate_size=4 * hidden, num_hidden_layers=layers,
        num_attention_heads=16, num_key_value_heads=4, tie_word_embeddings=False,
    )  # fmt: skip
    config.save_pretrained(folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    index: dict[str, str] = {}
    total = 0
    groups: dict[str, dict[str, Any]] = {}
    for name, param in model.named_parameters():
        part = "-".join(name.split(".")[:3]) if ".layers." in name else "rest"
        groups.setdefault(part, {})[name] = param
    for part, params in groups.items():
        tensors = {n: torch.randn(p.shape, dtype=torch.bfloat16) * 0.02 for n, p in params.items()}
        save_file(tensors, folder / f"{part}.safetensors", metadata={"format": "pt"})
        index |= dict.fromkeys(tensors, f"{part}.safetensors")
        total += sum(t.numel() * 2 for t in tensors.values())
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": total}, "weight_map": index})
    )
    return total


def measure(name: str, model: Path, precision: str) -> list[dict[str, int]]:
    """What both ranks of one engine measured."""
    from shardwise.launch import operators, start

    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-W", "ignore", __file__, "--rank-of", name, "--model", str(model)]
        environment = {**operators.environment("cpu"), "LOAD_PRECISION": precision}
        outcome = start([*command, "--out", folder], 2, Path(folder) / "logs", environment)
        if outcome.failure:
            raise SystemExit("\n".join((outcome.failure.reason, *outcome.failure.tail)))
        return [json.loads((Path(folder) / f"{r}.json").read_text()) for r in range(2)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--precision", choices=("bf16", "fp32"), default="fp32", help="of the model built")
    parser.add_argument("--only", action="append", choices=ENGINES, help="may be given several times")
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=f"default: {TARGET}")
    asked = parser.parse_args()
    if asked.rank_of:
        rank(asked.rank_of, asked.model, asked.out)
        return
    from shardwise.launch import operators
    from shardwise.rules import situation

    names = asked.only or list(ENGINES)
    if any(name.startswith("zero") for name in names):
        operators.build(tuple(operators.OPERATORS), "cpu", lambda text: print(text, file=sys.stderr))
    with tempfile.TemporaryDirectory() as folder:
        size = write_model(Path(folder), asked.layers, asked.hidden)
        size *= 2 if asked.precision == "fp32" else 1
        found = {name: measure(name, Path(folder), asked.precision) for name in names}
    record = {
        "what": f"LoRA in {asked.precision} on a random Llama stored in bf16, two ranks on one CPU: "
        "own memory while building, above before",
        "date": date.today().isoformat(),
        "command": "python benchmarks/load_memory.py",
        "versions": dict(situation().versions or {}),
        "model_bytes": size,
        "engines": found,
    }
    target = asked.out or TARGET
    target.write_text(json.dumps(record, indent=1) + "\n")
    print(
        f"model {size / 2**20:.0f} MiB\n| engine | peak, sum of ranks | copies | held after | mapped files |"
    )
    print("|---|---:|---:|---:|---:|")
    for name, ranks in found.items():
        peak, held, files = (sum(r[k] for r in ranks) for k in ranks[0])
        cells = [f"{peak / 2**20:.0f}", f"{peak / size:.2f}", f"{held / 2**20:.0f}", f"{files / 2**20:.0f}"]
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
