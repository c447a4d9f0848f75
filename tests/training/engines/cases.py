"""What the contract is checked on: engine -> cases, each with the tolerance it must keep against `single`."""

import os
from dataclasses import dataclass, field
from typing import Any

STEPS = 20


@dataclass(frozen=True)
class Case:
    """`loss` and `weights` are relative tolerances over 20 steps."""

    name: str
    engine: dict[str, Any] = field(default_factory=dict)
    method: str = "full"
    precision: str = "fp32"
    tied: bool = False
    loss: float = 1e-5
    weights: float = 1e-4
    lora: dict[str, Any] = field(default_factory=dict)
    training: dict[str, Any] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)
    real: bool = False  # SmolLM2-135M instead of a tiny Llama, two steps instead of 20
    long: bool = (
        False  # only with SHARDWISE_LONG_TESTS: what costs half a minute and another engine's case shows
    )

    @property
    def steps(self) -> int:
        return 2 if self.real else STEPS

    @property
    def rate(self) -> float:
        return float(self.optimizer.get("learning_rate", 1e-3))

    @property
    def sections(self) -> dict[str, Any]:
        """For `toy.recipe`."""
        return {
            "method": self.method,
            "engine": self.engine,
            "training": {"precision": self.precision, **self.training},
            "lora": {"rank": 4, "alpha": 8.0, **self.lora},
            "optimizer": self.optimizer,
        }

    @property
    def model_key(self) -> str:
        return "smollm2" if self.real else "tied" if self.tied else "untied"

    @property
    def reference_key(self) -> str:
        quantised = self.engine.get("name") if self.method == "qlora" else ""
        return f"{self.method}-{self.precision}-{self.lora}-{self.training}-{self.optimizer}-{quantised}"


def _ddp(name: str, **options: Any) -> Case:
    return Case(name, {"name": "ddp"}, **options)


def _fsdp2(name: str, section: dict[str, Any] | None = None, **options: Any) -> Case:
    return Case(name, {"name": "fsdp2", "fsdp2": section or {}}, **options)


def _zero(name: str, section: dict[str, Any], **options: Any) -> Case:
    return Case(name, {"name": "deepspeed", "deepspeed": section}, **options)


BF16: dict[str, Any] = {"precision": "bf16", "loss": 5e-3, "weights": 5e-3}
SGD = {"name": "sgd", "learning_rate": 0.1}
REAL_SGD = {"name": "sgd", "learning_rate": 0.5}
# Not the same mathematics: a sum that rounds otherwise may be stored as the code beside, and blocks of 256 elements
# begin where a shard begins.
EIGHT_BIT = {"name": "adamw_8bit"}
OFFLOAD = {"offload_optimizer": "cpu"}
# Tiny weights all stay whole in stage 3 unless the threshold is 0.
SPLIT = {"zero_stage": 3, "param_persistence_threshold": 0}
NVME = {**SPLIT, "offload_optimizer": "nvme", "offload_parameters": "nvme", "nvme_path": "nvme"}

_EVERY = {
    "ddp": (
        _ddp("ddp-full"),
        _ddp("ddp-full-bf16", **BF16),
        _ddp("ddp-full-tied", tied=True),
        _ddp("ddp-lora", method="lora"),
        _ddp("ddp-lora-dora", method="lora", lora={"dora": True}),
        _ddp("ddp-qlora", method="qlora"),
        _ddp("ddp-full-checkpointing", training={"activation_checkpointing": 1, "loss": "full"}),
        _ddp("ddp-lora-smollm2", method="lora", real=True),
        _ddp("ddp-full-smollm2", real=True, long=True, optimizer=REAL_SGD),
        _ddp("ddp-qlora-smollm2", method="qlora", real=True, long=True),
        _ddp("ddp-full-sgd", optimizer=SGD),
        _ddp("ddp-full-adafactor", optimizer={"name": "adafactor"}),
        _ddp("ddp-full-muon", optimizer={"name": "muon"}),
        _ddp("ddp-full-8bit", optimizer=EIGHT_BIT, weights=1e-3),
    ),
    "fsdp2": (
        _fsdp2("fsdp2-full"),
        _fsdp2("fsdp2-full-bf16", **BF16),
        _fsdp2("fsdp2-full-tied", tied=True),
        _fsdp2("fsdp2-full-keeping", {"reshard_after_forward": False}),
        _fsdp2("fsdp2-full-offload", {"cpu_offload": True}),
        _fsdp2("fsdp2-full-replicate", {"dp_replicate": 2}),
        _fsdp2("fsdp2-full-checkpointing", training={"activation_checkpointing": "full"}),
        _fsdp2("fsdp2-lora", method="lora"),
        _fsdp2("fsdp2-lora-rslora-bf16", method="lora", lora={"rslora": True}, **BF16),
        _fsdp2("fsdp2-qlora", method="qlora"),
        _fsdp2("fsdp2-lora-smollm2", method="lora", real=True),
        _fsdp2("fsdp2-full-smollm2", real=True, optimizer=REAL_SGD),
        _fsdp2("fsdp2-qlora-smollm2", method="qlora", real=True, long=True),
        _fsdp2(
            "fsdp2-lora-dora", method="lora", lora={"dora": True}, training={"activation_checkpointing": 1}
        ),
        _fsdp2("fsdp2-full-compile", training={"compile": True}),
        _fsdp2("fsdp2-full-sgd", optimizer=SGD),
        _fsdp2("fsdp2-full-adafactor", optimizer={"name": "adafactor"}),
        _fsdp2("fsdp2-full-muon", optimizer={"name": "muon"}),
        _fsdp2("fsdp2-full-muon-bf16-offload", {"cpu_offload": True}, optimizer={"name": "muon"}, **BF16),
        _fsdp2("fsdp2-full-8bit", optimizer=EIGHT_BIT, loss=5e-4, weights=5e-3),
    ),
    "deepspeed": (
        _zero("zero1-full", {"zero_stage": 1}),
        _zero("zero1-full-bf16", {"zero_stage": 1}, **BF16),
        _zero("zero2-full", {"zero_stage": 2}),
        _zero("zero2-full-bf16", {"zero_stage": 2}, **BF16),
        _zero("zero3-full", SPLIT),
        _zero("zero3-full-bf16-tied", {"zero_stage": 3}, tied=True, **BF16),
        _zero("zero2-full-offload", {"zero_stage": 2, **OFFLOAD}),
        _zero("zero3-full-offload", {**SPLIT, **OFFLOAD, "offload_parameters": "cpu"}),
        _zero("zero3-full-nvme-bf16", NVME, **BF16),
        _zero("zero2-lora", {"zero_stage": 2}, method="lora"),
        _zero("zero3-lora", SPLIT, method="lora"),
        _zero("zero2-qlora", {"zero_stage": 2}, method="qlora"),
        _zero("zero3-lora-smollm2", {"zero_stage": 3}, method="lora", real=True),
        _zero("zero3-full-smollm2", {"zero_stage": 3}, real=True, long=True, optimizer=REAL_SGD),
        _zero("zero2-qlora-smollm2", {"zero_stage": 2}, method="qlora", real=True, long=True),
        _zero(
            "zero3-lora-dora",
            SPLIT,
            method="lora",
            lora={"dora": True},
            training={"activation_checkpointing": 1},
        ),
        _zero("zero2-full-sgd", {"zero_stage": 2}, optimizer=SGD, training={"activation_checkpointing": 1}),
        _zero("zero3-full-sgd-offload", {**SPLIT, **OFFLOAD, "offload_parameters": "cpu"}, optimizer=SGD),
    ),
}

LONG = bool(os.environ.get("SHARDWISE_LONG_TESTS"))
CASES = {engine: tuple(c for c in cases if LONG or not c.long) for engine, cases in _EVERY.items()}
