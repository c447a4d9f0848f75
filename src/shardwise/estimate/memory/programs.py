"""What the programs behind published measurements do with memory, read off their source and a table's columns.

A row names its software in `source` and describes the rest in columns; a program nobody described here is taken
for a transformers Trainer, which most are. Every line states something a
program does; several were looked for where estimates were off, and not all were checked in its source.
"""

import re
from collections.abc import Mapping
from dataclasses import replace

from shardwise.estimate.memory.trainer import Trainer

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

# unsloth: 16-bit logits whose gradient a kernel writes over them, RMS norms as one kernel (unsloth/models/llama.py,
# unsloth/kernels/cross_entropy_loss.py, read at 2024.8).
UNSLOTH = replace(
    HUGGING_FACE,
    name="unsloth",
    loss="split",
    loss_bytes=0,
    keeps_logits=False,
    norm="fused",
    adapter_bytes=4,
)

# Model code of transformers that upcasts its logits itself, so that the 16-bit ones are freed; and code that never
# does and computes the loss in 16 bits (both: before its common loss function of 2024).
UPCAST_IN_MODEL = ("granite", "granitemoe", "granitemoeshared", "chatglm")
LOSS_IN_16_BITS = ("gpt_bigcode", "qwen", "bloom", "falcon")
# How tables call losses that never hold all logits.
NO_LOGITS = r"liger|\bcut\b|\bcce\b|apple|fused[- ]linear|fused kernel|chunked|yes"
# GPTQ and AWQ: 4 or 8 bits, one 16-bit scale and one packed zero per group of 128; LLM.int8: a scale per row.
GROUPED_BYTES = {4: 0.5 + (2 + 0.5) / 128, 8: 1 + (2 + 1) / 128}
# Prepares a model in 4 bits by PEFT's prepare_model_for_kbit_training (xtuner/model/sft.py).
PREPARES = ("xtuner",)
# PEFT's adapters drop out inputs in these programs unless told otherwise: lora_dropout of swift/llm/utils/argument.py
# (0.05), Qwen's finetune.py (0.05), fsdp_qlora's train.py (0.1), PEFT's examples/sft (0.1), axolotl's examples (0.05)
# and xtuner's configurations (0.1).
DROPS_OUT = ("msswift", "qwen", "fsdp_qlora", "peft", "axolotl", "xtuner")
# Adapters in fp32 on a 16-bit base: PEFT before 0.7 casts them before it has the weight they adapt
# (peft/tuners/lora/layer.py, update_layer), and swift's own default (swift/llm/utils/argument.py, lora_dtype).
FP32_ADAPTERS = ("qwen", "msswift")


def program_of(text: Mapping[str, str], family: str) -> Trainer:
    """The trainer behind one row of a table of measured runs."""
    source = _source(text)
    trainer = {"litgpt": LITGPT, "torchtune": TORCHTUNE, "torchtitan": TORCHTITAN}.get(source, HUGGING_FACE)
    if source == "unsloth" and not text.get("notes", "").startswith(
        "HF"
    ):  # its tables have a baseline beside it
        trainer = UNSLOTH
    trainer = _dtypes(_loss(trainer, text), text, source)
    if trainer.name == "transformers":
        trainer = _transformers(trainer, text, source, family)
    if trainer.name == "torchtune":
        # recipes/configs of 0.3: custom_sharded_layers of every full_finetune_distributed
        units = text.get("method") == "full" and "FSDP2" in text.get("sharding", "")
        trainer = replace(trainer, root_units=units, sharded_scales=True)
    if _first_fsdp(text) and trainer.name in ("litgpt", "transformers"):
        trainer = replace(trainer, flat_gradients="whole" if trainer.name == "litgpt" else "trained")
    if "first step" in text.get("seq_kind", ""):  # the longest batch has no step before it
        trainer = replace(trainer, outlived_inputs=False)
    optimizer, compiled = text.get("optimizer", ""), text.get("compile", "no") != "no"
    selective = "selective" in text.get("act_ckpt", "") and not compiled
    return replace(
        trainer,
        compiled=compiled,
        selective_products=trainer.selective_products and selective,
        offloads_activations=text.get("cpu_offload") == "activations",
        fused_optimizer=trainer.fused_optimizer or "fused" in optimizer,
        quantised_experts=True,
        quantised_bytes=_quantised_bytes(text.get("quant", "")),
        paged_states="paged" in optimizer.casefold(),
        masters=trainer.masters or "DeepSpeed" in optimizer,
    )


def _source(text: Mapping[str, str]) -> str:
    if re.search("llama-(cookbook|recipes)", text.get("source_path", "")):
        return "llama-recipes"  # transformers and PEFT under FSDP, whoever quotes it
    return text.get("source", "")


def _loss(trainer: Trainer, text: Mapping[str, str]) -> Trainer:
    loss = text.get("fused_ce", "no")
    if trainer.name == "torchtune" and "chunked" in loss:
        compiled = text.get("compile") == "yes"  # the compiled loss keeps no fp32 copy of its logits
        return replace(trainer, loss="split", chunks=8, loss_bytes=0 if compiled else 4)
    if trainer.name == "torchtune" and re.search(r"2024-0[1-7]", text.get("source_path", "")):
        # recipes before August 2024 held the shifted fp32 logits through the backward (no `del logits` yet)
        return replace(trainer, keeps_logits=True, logits_bytes=4)
    if "materialised" in loss:  # one kernel that writes the gradient over the logits
        return replace(trainer, loss="kernel", keeps_logits=False)
    if trainer.name != "litgpt" and re.search(NO_LOGITS, loss, re.I):
        return replace(trainer, loss="fused", keeps_logits=False)
    return trainer


def _dtypes(trainer: Trainer, text: Mapping[str, str], source: str) -> Trainer:
    optimizer, quant = text.get("optimizer", ""), text.get("quant", "none")
    dtype, precision = text.get("param_dtype", ""), text.get("precision", "")
    fp32 = dtype.startswith("fp32")
    if source == "peft" and "FSDP" in text.get("sharding", "") and quant == "none":
        fp32 = True  # examples/sft/utils.py loads a base that is not quantised without a dtype
    states = 2 if ("bf16 states" in optimizer or precision in ("bf16-pure", "bf16-true")) else 4
    if fp32 or "fp32" in optimizer or "upcast of norms" in dtype:
        states = 4
    upcast = "upcast" in dtype + text.get("notes", "") or source in PREPARES
    return replace(
        trainer,
        state_bytes=states,
        weight_bytes=4 if fp32 else 2,
        fp32_leftovers=upcast and "nf4" in quant,
        autocast="autocast" in precision,
    )


def _transformers(trainer: Trainer, text: Mapping[str, str], source: str, family: str) -> Trainer:
    """What depends on the versions of transformers, accelerate and PEFT of the time."""
    precision, method, quant = text.get("precision", ""), text.get("method"), text.get("quant", "")
    if family in UPCAST_IN_MODEL:
        trainer = replace(trainer, keeps_logits=False)
    if family in LOSS_IN_16_BITS:  # autocast computes losses in fp32, and the shift copies the logits
        pure = precision in ("bf16-pure", "bf16-true")
        trainer = replace(trainer, loss_bytes=2 if pure else 4, picks_logits=not pure)
        if "autocast" in precision:  # accelerate hands out fp32 logits (convert_outputs_to_fp32)
            trainer = replace(trainer, logits_bytes=4)
    # PEFT gives adapters the dtype of the weight they adapt, unless that is no float: then they stay fp32
    no_float = method == "qlora" and "storage" not in quant and "pure" not in precision
    if no_float or (method == "lora" and source in FP32_ADAPTERS):
        trainer = replace(trainer, adapter_bytes=4)
    # swift checkpoints without re-entering since torch 2.1 (swift/llm/utils/model.py), with bitsandbytes before 0.43
    old = source == "msswift" and "bnb" in quant and text.get("act_ckpt", "none") != "none"
    return replace(
        trainer,
        quantised_inputs=trainer.quantised_inputs or old,
        unhooked_inputs=old,
        looped_experts=re.search(r"scattermoe|grouped", text.get("notes", "")) is None,
        outlived_recomputation=_first_fsdp(text) and method != "full" and _reentrant(text, source),
        adapter_dropout=source in DROPS_OUT and "method_comparison" not in text.get("source_path", ""),
        trained_embeddings="trainable embeddings" in text.get("lora_targets", ""),
    )


def _quantised_bytes(quant: str) -> float | None:
    """Bytes per element of a quantised base; None: NF4."""
    if re.search("gptq|awq|hqq", quant):
        return GROUPED_BYTES[8 if "8" in quant else 4]
    return 1.0 if re.search(r"int8|8.?bit", quant) else None


def _first_fsdp(text: Mapping[str, str]) -> bool:
    """FSDP as it was before its second version, which tables name."""
    return (
        re.search(r"FSDP(?!2)", text.get("sharding", "")) is not None and "NO_SHARD" not in text["sharding"]
    )


def _reentrant(text: Mapping[str, str], source: str) -> bool:
    """Whether layers are checkpointed in the re-entrant way, outside their FSDP units.

    It is a transformers Trainer's default (modeling_utils.py, gradient_checkpointing_enable).

    PEFT's LoRA scripts ask for the other way (examples/sft); llama-recipes and fsdp_qlora put the checkpoint inside
    the unit (apply_activation_checkpointing).
    """
    kind = text.get("act_ckpt", "none")
    inside = source in ("fsdp_qlora", "llama-recipes")
    other = (
        inside
        or source == "msswift"
        or "non-reentrant" in kind
        or (source == "peft" and text.get("method") == "lora")
    )
    return kind.startswith("full") and not other
