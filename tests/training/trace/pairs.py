"""What is compared on two real ranks: every engine of the contract suite, with each method it runs."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from shardwise.recipe.schema import Recipe
from shardwise.training.engines import ddp

DOCUMENTS = (100, 60, 40, 56)
# Buckets that fill up more than once in the small model, and ZeRO-3 that really lets go of what it gathered.
BUCKETS = {"reduce_bucket_size": 100_000, "allgather_bucket_size": 100_000}
ZERO3 = {
    "zero_stage": 3,
    "param_persistence_threshold": 0,
    "max_live_parameters": 100_000,
    "prefetch_bucket_size": 100_000,
    **BUCKETS,
}
HOST = {"offload_optimizer": "cpu"}
ALL_HOST = {**HOST, "offload_parameters": "cpu"}


@dataclass(frozen=True)
class Pair:
    """One run of two ranks. `real`: SmolLM2-135M, not a small Llama. `both`: each rank is traced, not only rank 0."""

    name: str
    engine: str
    section: dict[str, Any] = field(default_factory=dict)
    method: str = "full"
    precision: str = "bf16"
    checkpointing: str = "none"
    accumulation: int = 1
    loss: str = "chunked"
    optimizer: str = "adamw"
    tied: bool = False
    real: bool = False
    both: bool = False
    long: bool = False  # only with SHARDWISE_LONG_TESTS

    def recipe(self, folder: Path) -> Recipe:
        engine: dict[str, Any] = {"name": self.engine, "device": "cpu", "processes": 2}
        if self.section:
            engine[self.engine] = self.section
        return Recipe.model_validate(
            {
                "model": {"source": str(folder)},
                "data": {"train": ({"path": "none.jsonl"},), "sequence_length": sum(DOCUMENTS)},
                "method": self.method,
                "lora": {"rank": 8},
                "optimizer": {"learning_rate": 1e-4, "name": self.optimizer},
                "training": {
                    "micro_batch_size": 1,
                    "global_batch_size": 2 * self.accumulation,
                    "precision": self.precision,
                    "activation_checkpointing": self.checkpointing,
                    "loss": self.loss,
                },
                "engine": engine,
                "checkpoint": {"background": True},
            }
        )


def _fsdp2(name: str, section: dict[str, Any] | None = None, **options: Any) -> Pair:
    return Pair(f"fsdp2-{name}", "fsdp2", section or {}, **options)


def _zero(name: str, section: dict[str, Any], **options: Any) -> Pair:
    return Pair(name, "deepspeed", section, **options)


_EVERY = (
    Pair("ddp-full", "ddp", both=True),
    Pair("ddp-full-fp32", "ddp", precision="fp32"),
    Pair("ddp-full-accumulated", "ddp", accumulation=2, checkpointing="full"),
    Pair("ddp-lora", "ddp", method="lora"),
    Pair("ddp-qlora", "ddp", method="qlora", checkpointing="full"),
    Pair("ddp-full-muon", "ddp", optimizer="muon", long=True),
    _fsdp2("full"),
    _fsdp2("full-fp32", precision="fp32"),
    _fsdp2("full-accumulated", accumulation=2, checkpointing="full"),
    _fsdp2("full-tied-keeping", {"reshard_after_forward": False}, tied=True, both=True),
    _fsdp2("full-offload", {"cpu_offload": True}, checkpointing="full"),
    _fsdp2("full-replicas", {"dp_replicate": 2}),
    _fsdp2("full-all-logits", loss="full", long=True),
    _fsdp2("full-muon", optimizer="muon", long=True),
    _fsdp2("lora", method="lora", both=True),
    _fsdp2(
        "lora-selective",
        {"reshard_after_forward": False},
        method="lora",
        checkpointing="selective",
        long=True,
    ),
    _fsdp2("qlora", method="qlora"),
    _fsdp2("smollm2", real=True, checkpointing="full"),
    _zero("zero1-full", {"zero_stage": 1, **BUCKETS}, both=True),
    _zero(
        "zero1-full-accumulated",
        {"zero_stage": 1, **BUCKETS},
        accumulation=2,
        checkpointing="full",
        long=True,
    ),
    _zero("zero1-lora", {"zero_stage": 1, **BUCKETS}, method="lora", long=True),
    _zero("zero2-full", {"zero_stage": 2, **BUCKETS}, both=True),
    _zero("zero2-full-fp32", {"zero_stage": 2, **BUCKETS}, precision="fp32", long=True),
    _zero("zero2-full-accumulated", {"zero_stage": 2, **BUCKETS}, accumulation=2, checkpointing="full"),
    _zero("zero2-full-offload", {"zero_stage": 2, **HOST, **BUCKETS}),
    _zero("zero2-lora", {"zero_stage": 2, **BUCKETS}, method="lora"),
    _zero("zero2-qlora", {"zero_stage": 2, **BUCKETS}, method="qlora", checkpointing="full"),
    _zero("zero2-full-sgd", {"zero_stage": 2, **BUCKETS}, optimizer="sgd", long=True),
    _zero("zero3-full", ZERO3, both=True),
    _zero("zero3-full-live", {"zero_stage": 3, **BUCKETS}, tied=True, long=True),
    _zero("zero3-full-accumulated", ZERO3, accumulation=2, checkpointing="full", long=True),
    _zero("zero3-full-offload", {**ZERO3, **ALL_HOST}, checkpointing="full"),
    _zero("zero3-lora", ZERO3, method="lora"),
)

LONG = bool(os.environ.get("SHARDWISE_LONG_TESTS"))
PAIRS = tuple(pair for pair in _EVERY if LONG or not pair.long)


@contextmanager
def small_buckets() -> Iterator[None]:
    """DDP reduces a small model's gradients in more than one bucket, as it does a real one's."""
    with mock.patch.dict(ddp._CAP, {key: [1] for key in ddp._CAP if key == "bucket_cap_mb_list"}):
        yield


def make_model(folder: Path, tied: bool) -> Path:
    """A small Llama on disk whose states are larger than the rounding of anything."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1009,
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=5,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=tied,
        dtype=torch.bfloat16,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder
