"""Peak memory of each engine on a model large enough that its states dominate, for `test_contract.py`."""

from pathlib import Path
from typing import Any

import torch
import toy

from shardwise.training.build import build_engine
from shardwise.training.device_peak import DevicePeak
from shardwise.training.engines.protocol import Ranks
from shardwise.training.model import ModelFolder

_BUCKETS = {"reduce_bucket_size": 100_000, "allgather_bucket_size": 100_000, "prefetch_bucket_size": 100_000}
_ZERO3 = {"zero_stage": 3, "param_persistence_threshold": 0, "max_live_parameters": 100_000, **_BUCKETS}
_HOST = {"offload_optimizer": "cpu"}
ENGINES: dict[str, dict[str, dict[str, Any]]] = {
    "ddp": {"ddp": {"name": "ddp"}},
    "fsdp2": {
        "fsdp2": {"name": "fsdp2"},
        "fsdp2-offload": {"name": "fsdp2", "fsdp2": {"cpu_offload": True}},
    },
    "deepspeed": {
        name: {"name": "deepspeed", "deepspeed": section}
        for name, section in {
            "zero1": {"zero_stage": 1, **_BUCKETS},
            "zero2": {"zero_stage": 2, **_BUCKETS},
            "zero3": _ZERO3,
            "zero2-offload": {"zero_stage": 2, **_HOST, **_BUCKETS},
            "zero3-offload": {**_ZERO3, **_HOST, "offload_parameters": "cpu"},
        }.items()
    },
}


def measure(engine: dict[str, Any], folder: Path, ranks: Ranks) -> dict[str, int]:
    """Peak bytes on device and host of two steps of two short micro-batches, bf16 with fp32 masters."""
    training = {"precision": "bf16", "activation_checkpointing": "full"}
    recipe = toy.recipe(engine=engine, training=training)
    live = build_engine(recipe, ModelFolder(folder, recipe), torch.device("cpu"), ranks, 2)
    peak = DevicePeak(live)
    for step in range(2):
        batches = toy.micro_batches(step, ranks.world_size, ranks.rank)
        with peak.watching():
            for i, batch in enumerate(batches):
                peak.enter("forward")
                loss = live.forward(batch)
                peak.enter("backward")
                live.backward(loss, 1e-2, last=i == len(batches) - 1)
                del loss
            peak.enter("step")
            live.step(1e-3, 0.5)
    live.close()
    split = peak.split()
    return {"device": split.device_bytes, "host": split.host_bytes}
