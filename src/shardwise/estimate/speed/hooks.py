"""What a sharding engine adds to the host's work, in operations per micro-batch.

Measured in processor time of the calling thread against the same model without an engine: Llama of 24 layers,
width 64, 16 tokens, full checkpointing, two ranks, torch 2.13, DeepSpeed 0.19.8 (benchmarks/engine_hooks.py and
its file in measurements/). One operation is what eager PyTorch issues in the time of `constants.OP_SECONDS`.
"""

from functools import lru_cache
from typing import Literal

from shardwise.estimate.speed import constants as c
from shardwise.estimate.stack import Stack
from shardwise.facts.model import ModelShape

Engine = Literal["none", "fsdp", "zero", "zero3"]


def engine_of(stack: Stack, alone: str) -> Engine:
    """Whose hooks run. `alone`: the ZeRO stage of a program that keeps its engine on one rank ('zero3')."""
    name = stack.sharding if stack.world_size > 1 or stack.sharding != "single" else alone
    if name == "fsdp2":
        return "fsdp"
    if name == "zero3":
        return "zero3"
    return "zero" if name in ("zero1", "zero2") else "none"


@lru_cache(maxsize=4096)
def _tensors(shape: ModelShape, method: str, targets: str | tuple[str, ...], looped: bool) -> tuple[int, int]:
    """(parameter tensors of the model with its adapters, those of them that are trained)."""
    base = sum(t.count * (t.shape[0] if looped and t.kind == "expert" else 1) for t in shape.tensors)
    if method == "full":
        return base, base
    adapters = 2 * sum(t.count for t in shape.adapted(targets))
    return base + adapters, adapters


def hook_operations(
    shape: ModelShape,
    engine: Engine,
    method: str,
    targets: str | tuple[str, ...],
    again: float,
    looped: bool,
    adapter_units: bool,
) -> float:
    """Operations that an engine adds to one micro-batch.

    again: share of the layers that are recomputed. adapter_units: FSDP wraps every adapter matrix as a unit of
    its own, as PEFT's wrapping policy does.
    """
    if engine == "none":
        return 0.0
    every, trained = _tensors(shape, method, targets, looped)
    if engine == "zero":
        return c.OPS_PER_BUCKETED * trained
    if engine == "zero3":
        return c.OPS_PER_GATHERED * (3 + again) * every
    units = shape.num_hidden_layers + 1 + (trained if method != "full" and adapter_units else 0)
    return c.OPS_PER_UNIT * units + c.OPS_PER_SHARD * every
