"""Memory of a measured run, by what its program did: the number its author's own meter should have shown."""

import re
from collections.abc import Mapping
from dataclasses import replace

from shardwise.estimate.memory.fixed import fixed_bytes
from shardwise.estimate.memory.formula import estimate_memory, reserved_without_expandable_segments
from shardwise.estimate.memory.programs import LOSS_IN_16_BITS, program_of
from shardwise.estimate.memory.terms import MemoryEstimate
from shardwise.estimate.memory.trainer import Trainer
from shardwise.estimate.stack import Stack
from shardwise.facts.model import ModelShape
from shardwise.units import GIB

# Lengths of batches, as shares of a cap. Batches come in no order, and the pools grow whenever one is longer than
# all before it: where documents are cut at the cap, new records creep up on it (those of the sequence n/phi modulo
# 1, which fills a range most evenly); where a cap is only an upper limit, few batches come near it.
CUT_AT_A_CAP = (0.618, 0.854, 0.944, 1.0)
UP_TO_A_CAP = (0.5, 0.75, 1.0)


def row_memory(
    text: Mapping[str, str], shape: ModelShape | None, stack: Stack
) -> tuple[MemoryEstimate, int] | str:
    """(estimate, the bytes to compare with the row's measurement), or why there is none.

    The bytes are allocated, reserved or all of the card's, as the row measured; for a run that went out of
    memory, what its allocator, torch's default, would have needed with everything fixed.
    """
    reason = _declined(text, shape)
    if reason:
        return reason
    assert shape is not None
    trainer = program_of(text, shape.model_type)
    shape, stack = _per_rank(text, shape, stack)
    if text.get("sharding_norm", "").startswith("zero") and "ZeRO" in text["sharding"]:
        stack, trainer = _deepspeed(text, shape, stack, trainer)
    estimate = estimate_memory(shape, stack, trainer)
    kind = text.get("mem_kind", "")
    if "allocated" in kind or "active" in kind:
        return estimate, estimate.allocated_bytes
    reserved = reserved_without_expandable_segments(
        shape, stack, trainer, _lengths(text.get("seq_kind", "exact"))
    )
    fixed = fixed_bytes(stack)
    if text.get("outcome") == "oom":
        return estimate, max(reserved, estimate.allocated_bytes) + fixed
    # A card that is full makes the allocator give free segments back before it gives up.
    card = int(float(text.get("gpu_mem_gb") or 0) * GIB) or reserved + fixed
    reserved = max(min(reserved, card - fixed), estimate.allocated_bytes)
    return estimate, reserved + (fixed if "smi" in kind else 0)


def _deepspeed(
    text: Mapping[str, str], shape: ModelShape, stack: Stack, trainer: Trainer
) -> tuple[Stack, Trainer]:
    """DeepSpeed, also on one rank; until 2026 it added gradients up in the dtype of the weights."""
    stack = replace(stack, sharding=text["sharding_norm"])  # type: ignore[arg-type]
    trainer = replace(trainer, masters=True, state_bytes=4, gradient_bytes=2, whole_buckets=True)
    if text.get("precision", "").startswith(("bf16", "fp16")):  # the engine casts all of the model
        trainer = replace(trainer, adapter_bytes=None, fp32_leftovers=False)
    if shape.model_type in LOSS_IN_16_BITS:  # weights in 16 bits, no autocast
        trainer = replace(trainer, loss_bytes=2, picks_logits=False)
    if text.get("source") == "qwen":  # finetune/ds_config_zero2.json
        stack = replace(stack, reduce_bucket_size=2 * 10**8)
    return stack, trainer


def _lengths(kind: str) -> tuple[float, ...]:
    if kind.startswith(("exact", "packed")):
        return ()
    return CUT_AT_A_CAP if kind.startswith("truncated") else UP_TO_A_CAP


def _per_rank(text: Mapping[str, str], shape: ModelShape, stack: Stack) -> tuple[ModelShape, Stack]:
    """Tensor parallelism with sequence parallelism splits weights and activations alike: a rank has its part of the
    tokens, and all ranks share the states. A naive split over devices gives each a part of the layers."""
    tp = int(float(text.get("tp") or 1))
    if tp > 1:
        stack = replace(stack, sequence_length=max(1, stack.sequence_length // tp), dp_replicate=1)
    if "device_map" in text.get("sharding", ""):
        n = stack.world_size
        tensors = tuple(replace(t, count=-(-t.count // n)) if t.per_layer else t for t in shape.tensors)
        shape = replace(
            shape,
            tensors=tensors,
            num_hidden_layers=-(-shape.num_hidden_layers // n),
            total_parameters=sum(t.parameters for t in tensors),
        )
        stack = replace(stack, sharding="single", world_size=1)
    return shape, stack


def _declined(text: Mapping[str, str], shape: ModelShape | None) -> str:
    if shape is None:
        return f"model {text.get('model')} is not in the catalogue"
    if "galore" in text.get("optimizer", "").casefold():
        return "GaLore is not estimated"
    for axis, name in (("pp", "pipeline"), ("cp", "context"), ("ep", "expert")):
        if float(text.get(axis) or 1) > 1:
            return f"{name} parallelism is not estimated"
    if re.search("nvfp", text.get("precision", "")):
        return f"precision {text['precision']} is not estimated"
    if re.match("(padded|padding-free) mean", text.get("seq_kind", "")):
        return "the row gives the mean length of its batches, and the longest sets the peak"
    return ""
