"""What the programs behind published measurements do with memory, read off their source and a table's columns.

A row names its software in `source` and describes the rest in columns; a program nobody described here is taken
for a transformers Trainer, which most are. Every line states something a
program does; several were looked for where estimates were off, and not all were checked in its source.
"""

import re
from collections.abc import Mapping
from dataclasses import replace

from shardwise.estimate.memory.fixed import fixed_bytes
from shardwise.estimate.memory.formula import estimate_memory, reserved_without_expandable_segments
from shardwise.estimate.memory.terms import MemoryEstimate
from shardwise.estimate.memory.trainer import Trainer
from shardwise.estimate.stack import Stack
from shardwise.facts.model import ModelShape
from shardwise.units import GIB

# transformers + PEFT + torch AdamW: full logits in fp32, its output object alive through the backward.
HUGGING_FACE = Trainer(
    "transformers", loss="full", keeps_logits=True, masters=False, whole_step=True, loads=0
)
# litgpt (litgpt/finetune/lora.py, litgpt/lora.py, litgpt/utils.py, read at 0.4.11): logits in chunks of 128 tokens
# but all alive, cast to fp32 by Fabric, whose step keeps `logits` until the next forward has returned; bitsandbytes
# 0.41 and 0.42, through fp16, for every nn.Linear, the output matrix among them.
LITGPT = Trainer(
    "litgpt",
    loss="split",
    keeps_logits=True,
    loss_bytes=4,
    logits_bytes=4,
    masters=False,
    whole_step=True,
    chunk_tokens=128,
    fused_qkv=True,
    expands_groups=True,
    adapter_dropout=True,
    quantised_inputs=True,
    quantised_head=True,
    dequantised_twice=True,
    outlived_inputs=True,
    padded_qkv=True,
    gradient_buckets=True,
    loads=1.5,
    unties=True,
)
# torchtune: eight chunks, cross-entropy of each in fp32 (torchtune/modules/loss/ce_chunked_output_loss.py).
TORCHTUNE = Trainer("torchtune", loss="full", masters=False, whole_step=True, fused_optimizer=True, loads=0)
# torchtitan: F.cross_entropy(pred.flatten(0, 1).float(), labels.flatten(0, 1)).
TORCHTITAN = Trainer(
    "torchtitan", loss="full", masters=False, whole_step=True, norm="fused", loads=0, selective_products=True
)


# Model code of transformers that upcasts its logits itself, so that the 16-bit ones are freed; and code that never
# does and computes the loss in 16 bits (both: before its common loss function of 2024).
UPCAST_IN_MODEL = ("granite", "granitemoe", "granitemoeshared", "chatglm")
LOSS_IN_16_BITS = ("gpt_bigcode", "qwen", "bloom", "falcon")
# Lengths of batches, as shares of a cap. Batches come in no order, and the pools grow whenever one is longer than
# all before it: where documents are cut at the cap, new records creep up on it (those of the sequence n/phi modulo
# 1, which fills a range most evenly); where a cap is only an upper limit, few batches come near it.
CUT_AT_A_CAP = (0.618, 0.854, 0.944, 1.0)
UP_TO_A_CAP = (0.5, 0.75, 1.0)
# GPTQ: 4 or 8 bits, one 16-bit scale and one packed zero per group of 128.
GPTQ_BYTES = {"gptq int4": 0.5 + (2 + 0.5) / 128, "gptq int8": 1 + (2 + 1) / 128}


def program_of(text: Mapping[str, str], family: str) -> Trainer:
    """The trainer behind one row of a table of measured runs."""
    source, optimizer = text.get("source", ""), text.get("optimizer", "")
    dtype, precision = text.get("param_dtype", ""), text.get("precision", "")
    trainer = {"litgpt": LITGPT, "torchtune": TORCHTUNE, "torchtitan": TORCHTITAN}.get(source, HUGGING_FACE)
    loss = text.get("fused_ce", "no")
    if source == "torchtune" and "chunked" in loss:
        compiled = text.get("compile") == "yes"  # the compiled loss keeps no fp32 copy of its logits
        trainer = replace(trainer, loss="split", chunks=8, loss_bytes=0 if compiled else 4)
    elif source == "torchtune" and re.search(r"2024-0[1-7]", text.get("source_path", "")):
        # recipes before August 2024 held the shifted fp32 logits through the backward (no `del logits` yet)
        trainer = replace(trainer, keeps_logits=True, logits_bytes=4)
    elif re.search("liger|fused kernel", loss):
        trainer = replace(trainer, loss="fused", keeps_logits=False)
    elif "materialised" in loss:  # one kernel that writes the gradient over the logits
        trainer = replace(trainer, loss="kernel", keeps_logits=False)
    fp32_weights = dtype.startswith("fp32")
    states = 2 if ("bf16 states" in optimizer or precision in ("bf16-pure", "bf16-true")) else 4
    if fp32_weights or "fp32" in optimizer or "upcast of norms" in dtype:
        states = 4
    trainer = replace(
        trainer,
        state_bytes=states,
        weight_bytes=4 if fp32_weights else 2,
        fp32_leftovers="upcast" in dtype + text.get("notes", "") and "nf4" in text.get("quant", ""),
        autocast="autocast" in precision,
    )
    storage = "storage" in text.get("quant", "") or "pure" in precision
    if trainer.name == "transformers" and text.get("method") == "qlora" and not storage:
        # PEFT gives adapters the dtype of the weight they adapt, unless that is no float: then they stay fp32
        trainer = replace(trainer, adapter_bytes=4)
    if trainer.name == "transformers":
        if family in UPCAST_IN_MODEL:
            trainer = replace(trainer, keeps_logits=False)
        if family in LOSS_IN_16_BITS:  # autocast computes losses in fp32, and the shift copies the logits
            pure = precision in ("bf16-pure", "bf16-true")
            trainer = replace(trainer, loss_bytes=2 if pure else 4, picks_logits=not pure)
    quant, compiled = text.get("quant", ""), text.get("compile", "no") != "no"
    trainer = replace(
        trainer,
        compiled=compiled,
        selective_products=trainer.selective_products
        and "selective" in text.get("act_ckpt", "")
        and not compiled,
        offloads_activations=text.get("cpu_offload") == "activations",
    )
    if "first step" in text.get("seq_kind", ""):  # the longest batch has no step before it
        trainer = replace(trainer, outlived_inputs=False)
    if "fused" in optimizer:
        trainer = replace(trainer, fused_optimizer=True)
    trainer = replace(trainer, quantised_experts=True, quantised_bytes=GPTQ_BYTES.get(quant))
    if "DeepSpeed" in optimizer:
        trainer = replace(trainer, masters=True)
    return trainer


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
        # DeepSpeed also on one rank; until 2026 it added gradients up in the dtype of the weights
        stack = replace(stack, sharding=text["sharding_norm"])  # type: ignore[arg-type]
        trainer = replace(trainer, masters=True, state_bytes=4, gradient_bytes=2, whole_buckets=True)
        if text.get("source") == "qwen":  # finetune/ds_config_zero2.json
            stack = replace(stack, reduce_bucket_size=2 * 10**8)
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
    if not text.get("seq_len"):
        return "the row does not say how long its sequences are"
    for axis, name in (("pp", "pipeline"), ("cp", "context"), ("ep", "expert")):
        if float(text.get(axis) or 1) > 1:
            return f"{name} parallelism is not estimated"
    if re.search("nvfp", text.get("precision", "")):
        return f"precision {text['precision']} is not estimated"
    if text.get("seq_kind", "").startswith("padded mean"):
        return "the row gives the mean length of its batches, and the longest sets the peak"
    return ""
