"""Measure what each engine holds on each of two ranks: full fine-tuning of SmolLM2-135M, live tensor bytes.

    python benchmarks/engine_memory.py [--model FOLDER] [--only NAME]    about a minute per engine on two cores

Writes measurements/engine-memory-smollm2-2-ranks.json and prints the table of docs/engines.md. Two steps of two
micro-batches per rank, bf16 with fp32 masters, AdamW, full activation checkpointing, buckets of 10 million elements:
states dominate, so that the table shows what each engine splits. Offloaded tensors lie in host memory or on disk on
a machine with a GPU; here they are told apart by the engine (shardwise.training.device_peak): `device_bytes` is the
peak of all other live tensors.
"""

import argparse
import json
import os
import sys
import tempfile
from datetime import date
from pathlib import Path
from typing import Any

TARGET = Path(__file__).parents[1] / "measurements" / "engine-memory-smollm2-2-ranks.json"
# ZeRO-3 keeps up to a billion elements gathered by default, which is this whole model.
LIVE = {"max_live_parameters": 10_000_000, "param_persistence_threshold": 0}
BUCKETS = {
    "reduce_bucket_size": 10_000_000,
    "allgather_bucket_size": 10_000_000,
    "prefetch_bucket_size": 10_000_000,
}
OFFLOAD = {"offload_optimizer": "cpu"}
NVME = {"zero_stage": 3, "offload_optimizer": "nvme", "offload_parameters": "nvme", "nvme_path": "nvme"}
ENGINES: dict[str, dict[str, Any]] = {
    "ddp": {"name": "ddp"},
    "zero-1": {"name": "deepspeed", "deepspeed": {"zero_stage": 1, **BUCKETS}},
    "zero-2": {"name": "deepspeed", "deepspeed": {"zero_stage": 2, **BUCKETS}},
    "zero-3": {"name": "deepspeed", "deepspeed": {"zero_stage": 3, **LIVE, **BUCKETS}},
    "fsdp2": {"name": "fsdp2"},
    "fsdp2, all on cpu": {"name": "fsdp2", "fsdp2": {"cpu_offload": True}},
    "zero-2, optimizer on cpu": {"name": "deepspeed", "deepspeed": {"zero_stage": 2, **OFFLOAD, **BUCKETS}},
    "zero-3, all on cpu": {
        "name": "deepspeed",
        "deepspeed": {"zero_stage": 3, **OFFLOAD, "offload_parameters": "cpu", **LIVE, **BUCKETS},
    },
    "zero-3, all on nvme": {"name": "deepspeed", "deepspeed": {**NVME, **LIVE, **BUCKETS}},
}
TOKENS, MICRO_BATCHES = 256, 2  # with one micro-batch ZeRO-1 and 2 hold the same


def rank(name: str, model: Path, out: Path) -> None:
    """One rank of one engine; writes its measurement to `out`."""
    import torch
    import torch.distributed as dist

    from shardwise.recipe import Recipe
    from shardwise.training.batches import pack_documents
    from shardwise.training.build import build_engine
    from shardwise.training.device_peak import DevicePeak
    from shardwise.training.engines.protocol import Ranks
    from shardwise.training.meter import peak_resident_bytes
    from shardwise.training.model import ModelFolder

    os.chdir(out)
    ranks = Ranks(*(int(os.environ[k]) for k in ("RANK", "WORLD_SIZE", "LOCAL_RANK")))
    dist.init_process_group("gloo")
    recipe = Recipe.model_validate(
        {
            "model": {"source": str(model)},
            "data": {"train": [{"path": "random tokens"}]},
            "method": "full",
            "optimizer": {"learning_rate": 1e-5},
            "training": {
                "micro_batch_size": 1,
                "global_batch_size": MICRO_BATCHES * ranks.world_size,
                "precision": "bf16",
                "activation_checkpointing": "full",
                "loss": "chunked",
            },
            "engine": {"device": "cpu", "processes": ranks.world_size, **ENGINES[name]},
        }
    )
    engine = build_engine(recipe, ModelFolder(model, recipe), torch.device("cpu"), ranks, MICRO_BATCHES)
    meter = DevicePeak(engine)
    torch.manual_seed(ranks.rank)
    for _ in range(2):
        ids = torch.randint(0, 40_000, (TOKENS,)).numpy()
        batch = pack_documents([(ids.astype("int32"), ids)])
        with meter.watching():
            for i in range(MICRO_BATCHES):
                meter.enter("forward")
                loss = engine.forward(batch)
                meter.enter("backward")
                scale = 1 / (MICRO_BATCHES * ranks.world_size * (TOKENS - 1))
                engine.backward(loss, scale, last=i == MICRO_BATCHES - 1)
                del loss
            meter.enter("step")
            engine.step(1e-5, 1.0)
    held = {term: _bytes(tensors) for term, tensors in engine.tensors().items()}
    split = meter.split()
    found = {
        "engine": name,
        "rank": ranks.rank,
        "facts": engine.facts(),
        "held_bytes": held,
        "peak_allocated_bytes": split.all_bytes,
        "device_bytes": split.device_bytes,
        "device_phase": split.phase,
        "device_terms": split.terms,
        "host_bytes": split.host_bytes,
        "peak_resident_bytes": peak_resident_bytes(),
        "method": "bytes of live tensors, storages followed during 2 steps; offloaded ones told apart",
    }
    (out / f"rank-{ranks.rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def _bytes(tensors: Any) -> int:
    seen = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(seen.values())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", type=Path, help="a model folder; default: the demo's SmolLM2-135M-Instruct"
    )
    parser.add_argument("--only", help="one engine of: " + ", ".join(ENGINES))
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.rank_of:
        rank(asked.rank_of, asked.model, asked.out)
        return
    from shardwise.launch import operators, start
    from shardwise.rules import situation

    model = asked.model
    if model is None:
        from shardwise.cli.demo import demo_model

        model = demo_model()
    operators.build(tuple(operators.OPERATORS), "cpu", lambda text: print(text, file=sys.stderr))
    records = json.loads(TARGET.read_text())["engines"] if TARGET.exists() and asked.only else []
    for name in [asked.only] if asked.only else ENGINES:
        with tempfile.TemporaryDirectory() as folder:
            command = [
                sys.executable,
                __file__,
                "--rank-of",
                name,
                "--model",
                str(model.resolve()),
                "--out",
                folder,
            ]
            outcome = start(command, 2, Path(folder) / "logs", operators.environment("cpu"))
            if outcome.failure:
                raise SystemExit("\n".join((outcome.failure.reason, *outcome.failure.tail)))
            ranks = [json.loads((Path(folder) / f"rank-{r}.json").read_text()) for r in range(2)]
        records = [r for r in records if r["engine"] != name] + [max(ranks, key=lambda r: r["device_bytes"])]
        print(json.dumps(records[-1]["held_bytes"]), records[-1]["device_bytes"], file=sys.stderr)
    TARGET.parent.mkdir(exist_ok=True)
    TARGET.write_text(
        json.dumps(
            {
                "what": "full fine-tuning of SmolLM2-135M, bf16 with fp32 masters, AdamW, 2 ranks on one CPU, "
                f"{MICRO_BATCHES} micro-batches of {TOKENS} tokens per rank and step, fullest rank",
                "date": date.today().isoformat(),
                "command": "python benchmarks/engine_memory.py",
                "versions": dict(situation().versions or {}),
                "engines": records,
            },
            indent=1,
        )
        + "\n"
    )
    print(table(records))


def table(records: list[dict[str, Any]]) -> str:
    """Markdown; MiB. What is offloaded says where; the last two columns are peaks within a step."""
    terms = ("weights", "master_weights", "gradients", "optimizer")
    lines = [
        "| engine | " + " | ".join(t.replace("_", " ") for t in terms) + " | peak on device | peak in host |"
    ]
    lines.append("|---|" + "---:|" * (len(terms) + 2))
    for record in sorted(records, key=lambda r: list(ENGINES).index(r["engine"])):
        facts = record["facts"]
        everything = facts.get("cpu_offload", False)
        states = "cpu" if everything else facts.get("offload_optimizer", "none")
        weights = "cpu" if everything else facts.get("offload_parameters", "none")
        cells = []
        for term in terms:
            place = weights if term == "weights" else states
            size = f"{record['held_bytes'].get(term, 0) / 2**20:.0f}"
            cells.append({"none": size, "cpu": f"{size} (host)", "nvme": "on disk"}[place])
        cells += [f"{record[key] / 2**20:.0f}" for key in ("device_bytes", "host_bytes")]
        lines.append(f"| {record['engine']} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
