"""Measured runs in a CSV file -> what the estimates are asked: model, stack, GPU, and what the program did.

Columns as in docs/accuracy.md. A row that asks for something no estimate covers is declined, with the reason.
"""

import csv
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardwise.errors import UsageError
from shardwise.estimate.memory.programs import NO_LOGITS
from shardwise.estimate.speed import Program
from shardwise.estimate.stack import Stack
from shardwise.facts.catalogue import named_shape
from shardwise.facts.gpus import Gpu, find_gpu
from shardwise.facts.model import ModelShape
from shardwise.plan.cells import clean, gpu_spellings, number

NEEDED = ("id", "model", "method", "sharding", "num_gpus", "gpu_kind", "micro_batch_per_gpu", "seq_len")
_GIB = 2**30
_UNITS = {"gib": _GIB, "gb": 10**9, "mib": 2**20, "mb": 10**6}


@dataclass(frozen=True, slots=True)
class Row:
    """One measured run. `declined` is why its time is not estimated; empty when it is. `stack` is None where
    the columns do not say it.

    `program` is what the run's software does for speed; `raw` the columns as they stand, for whoever maps more.
    `weight_bytes` are bytes per resident parameter of the base.
    """

    id: str
    raw: Mapping[str, str]
    declined: str
    shape: ModelShape | None = None
    gpu: Gpu | None = None
    stack: Stack | None = None
    program: Program = field(default_factory=Program)
    weight_bytes: float = 2.0
    measured_bytes: float | None = None
    memory_kind: str = ""  # allocated | active | reserved | nvidia-smi | unknown
    memory_usable: str = "no"  # yes | bound | no
    out_of_memory: bool = False
    tokens_per_second_per_gpu: float | None = None
    throughput_usable: str = "no"  # yes | approx | no
    lengths_exact: bool = True

    def text(self, column: str) -> str:
        return (self.raw.get(column) or "").strip()


def read_rows(path: str | Path) -> list[Row]:
    """Every row of a CSV file. Raises UsageError for a file that is not one of these tables."""
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            table = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as problem:
        raise UsageError(
            f"'{path}' cannot be read", str(problem), "give a CSV file with one measured run per line"
        ) from None
    missing = [c for c in NEEDED if not table or c not in table[0]]
    if missing:
        raise UsageError(
            f"'{path}' is not a table of measured runs",
            f"it has no column {', '.join(missing)}" if table else "it has no rows",
            f"needed columns: {', '.join(NEEDED)}; see docs/accuracy.md",
        )
    return [parse_row(line) for line in table]


def parse_row(raw: Mapping[str, str]) -> Row:
    """One line of the table -> Row. What can be read is filled in also where no time is estimated."""
    text = clean(raw)
    base: dict[str, Any] = {"id": text["id"], "raw": text, **_measured(text)}
    shape = named_shape(text["model"])
    if shape is None:
        return Row(declined=f"model {text['model']} is not in the catalogue", **base)
    base["shape"] = shape
    try:
        base["stack"] = _stack(text, shape)
    except ValueError as problem:
        return Row(declined=f"the row does not say its setup: {problem}", **base)
    base |= {"program": _program(text), "weight_bytes": _weight_bytes(text)}
    base["gpu"] = _gpu(text)
    if base["gpu"] is None:
        return Row(declined=f"GPU {text['gpu_kind']} is not in the catalogue", **base)
    return Row(declined=_not_offered(text), **base)


def _gpu(text: Mapping[str, str]) -> Gpu | None:
    for name in gpu_spellings(text["gpu_kind"], text.get("gpu_mem_gb", "")):
        try:
            return find_gpu(name)
        except UsageError:
            continue
    return None


def _measured(text: Mapping[str, str]) -> dict[str, Any]:
    size = number(text.get("measured_peak_mem_GB"))
    unit = _UNITS.get(text.get("mem_unit", "").casefold(), _GIB)
    kind = text.get("mem_kind", "")
    return {
        "measured_bytes": None if size is None else size * unit,
        "memory_kind": next(
            (k for k in ("nvidia-smi", "allocated", "reserved", "active") if k in kind), "unknown"
        ),
        "memory_usable": text.get("mem_usable", "no"),
        "out_of_memory": text.get("outcome") == "oom",
        "tokens_per_second_per_gpu": number(text.get("tokens_per_s_per_gpu")),
        "throughput_usable": text.get("tput_usable", "no"),
        "lengths_exact": text.get("seq_kind", "").rstrip("?") in ("exact", "packed"),
    }


def _whole(text: Mapping[str, str], column: str) -> int:
    """A count that must be there. Raises ValueError."""
    value = number(text.get(column))
    if value is None or value < 1:
        raise ValueError(f"{column} is {text.get(column) or 'empty'}")
    return int(value)


def _not_offered(text: Mapping[str, str]) -> str:
    """Why a run's setup is nothing that is estimated; empty when it is."""
    for axis, name in (("tp", "tensor"), ("pp", "pipeline"), ("cp", "context"), ("ep", "expert")):
        if (number(text.get(axis)) or 1) > 1:
            return f"{name} parallelism is not an engine here"
    if re.search(r"fp8|mxfp|nvfp", text.get("precision", "")):
        return f"precision {text['precision']} is not offered"
    sharding = text["sharding"]
    if "Megatron" in sharding:
        return "Megatron is not an engine here"
    if "device_map" in sharding:
        return "a naive split of layers over GPUs is not an engine here"
    if "gptq" in text.get("quant", ""):
        return f"{text['quant']} weights are not offered"
    if "galore" in text.get("optimizer", "").casefold():
        return "GaLore is not offered"
    if "fused in backward" in text.get("optimizer", ""):
        return "an optimizer step inside the backward pass is not offered"
    if text.get("cpu_offload") == "activations":
        return "offloading activations is not offered"
    if re.search(r"thunder", text.get("compile", "")):
        return "another compiler (Thunder) is not offered"
    return ""


# Longest record of data sets that tables name: tokens with a vocabulary of 32,000 words (Llama-2), and with more.
# Alpaca: what litgpt's tutorial table pads to (tutorials/resource-tables.md).
LONGEST_RECORDS = {"alpaca": (1304, 1044)}


def _length(text: Mapping[str, str], shape: ModelShape) -> int:
    """Tokens of the longest sequence; of a named set that is not packed, its longest record. Raises ValueError."""
    kind = text.get("seq_kind", "")
    words = f"{kind} {text.get('notes', '')}".casefold()
    longest = next((n for name, n in LONGEST_RECORDS.items() if name in words), None)
    if longest is None or not re.match("unpacked|short|cap", kind):
        return _whole(text, "seq_len")
    record = longest[0] if shape.vocab_size <= 32_100 else longest[1]
    return min(record, int(number(text.get("seq_len")) or record))


def _stack(text: Mapping[str, str], shape: ModelShape) -> Stack:
    ranks = _whole(text, "num_gpus")
    per_node = int(number(text.get("gpus_per_node")) or min(ranks, 8))
    sharding, replicate = _sharding(text, ranks, per_node)
    method: Any = text["method"]
    if method not in ("full", "lora", "qlora"):
        raise ValueError(f"method is {method or 'empty'}")
    offload = text.get("cpu_offload", "none")
    parameters = "cpu" if offload.startswith("params") else "none"
    optimizer = "cpu" if "optimizer" in offload or (parameters == "cpu" and sharding == "fsdp2") else "none"
    fp32 = text.get("precision", "bf16").startswith("fp32")
    pure = "pure" in text.get("precision", "") or "true" in text.get("precision", "")
    return Stack(
        method=method,
        sharding=sharding,
        world_size=ranks,
        gpus_per_node=min(per_node, ranks),
        dp_replicate=replicate,
        offload_optimizer=optimizer,  # type: ignore[arg-type]
        offload_parameters=parameters,  # type: ignore[arg-type]
        micro_batch_size=max(1, _whole(text, "micro_batch_per_gpu")),
        sequence_length=_length(text, shape),
        gradient_accumulation_steps=int(number(text.get("grad_accum")) or 1),
        precision="fp32" if fp32 else "bf16",
        master_weights=not pure,
        optimizer=_optimizer(text.get("optimizer", "")),
        activation_checkpointing=_checkpointing(text.get("act_ckpt", "none")),
        loss="chunked" if re.search(NO_LOGITS, text.get("fused_ce", "no"), re.I) else "full",
        attention="eager" if text.get("attention") == "eager" else "sdpa",
        compile=text.get("compile") == "yes",
        lora_rank=int(number(text.get("lora_rank")) or 16),
        lora_targets=targets_of(text.get("lora_targets", ""), shape) if method != "full" else "all-linear",
        dora="DoRA" in text.get("lora_targets", ""),
        double_quantization="no double" not in text.get("quant", ""),
    )


def _sharding(text: Mapping[str, str], ranks: int, per_node: int) -> tuple[Any, int]:
    name, norm = text["sharding"], text.get("sharding_norm", "")
    if ranks == 1:
        return "single", 1
    if norm == "hsdp" or "HSDP" in name:
        return "fsdp2", max(1, ranks // per_node)
    if "FSDP" in name and "NO_SHARD" not in name:
        return "fsdp2", 1
    if norm in ("zero1", "zero2", "zero3"):
        return norm, 1
    return "ddp", 1


def _optimizer(name: str) -> str:
    plain = name.casefold()
    eight = re.search(r"8[\s_-]?bit", plain) is not None
    if "paged" in plain:
        return "paged_adamw_8bit" if eight else "adamw"
    if eight:
        return "adamw_8bit"
    return next((known for known in ("sgd", "adafactor", "muon") if known in plain), "adamw")


def _checkpointing(name: str) -> Any:
    if name.startswith("full"):
        return "full"
    if name.startswith("none"):
        return "none"
    return "selective"


# Letters of a table -> module names over the families.
_LETTERS = {
    "q": ("q_proj",),
    "k": ("k_proj",),
    "v": ("v_proj",),
    "o": ("o_proj", "dense", "out_proj", "c_proj"),
    "mlp": (
        *("gate_proj", "up_proj", "down_proj", "gate_up_proj", "fc1", "fc2", "c_fc"),
        *("dense_h_to_4h", "dense_4h_to_h", "w1", "w2"),
    ),
    "fused qkv": ("query_key_value", "qkv_proj", "c_attn", "W_pack", "Wqkv"),
    "w1": ("gate_proj",),
    "w2": ("up_proj",),
}


def targets_of(text: str, shape: ModelShape) -> str | tuple[str, ...]:
    """'q,k,v,mlp' of a table -> names of this model's layers; all linear layers where it says so or nothing."""
    words = [w.strip() for w in re.split(r",| or |\(|\+", text) if w.strip()]
    if not words or "all" in text.casefold():
        return "all-linear"
    known = {t.module for t in shape.tensors if t.kind == "linear" and t.part == "text"}
    chosen: set[str] = set()
    for word in words:
        names = _LETTERS.get(word, (word,))
        hits = known & set(names)
        if word == "mlp" and not hits:
            hits = {m for m in known if "mlp" in m}
        chosen |= hits
    if not chosen & {"q_proj", "k_proj", "v_proj"} and any(w in ("q", "k", "v") for w in words):
        chosen |= known & set(_LETTERS["fused qkv"])
    if "c_proj" in words and "c_attn" in known and "down_proj" in known:
        chosen.add("down_proj")  # Qwen calls the last matrix of its MLP so too
    if "attention qkv" in text:
        chosen |= known & {"q_proj", "k_proj", "v_proj"}
    return tuple(sorted(chosen)) or "all-linear"


def _weight_bytes(text: Mapping[str, str]) -> float:
    return 4.0 if text.get("param_dtype", "").startswith("fp32") else 2.0


_OWN_LORA = ("torchtune", "litgpt", "unsloth", "nvidia", "fsdp_qlora")


def _program(text: Mapping[str, str]) -> Program:
    """What the run's software does that matters for time and that its columns say."""
    kind = text.get("act_ckpt", "none")
    share = 0.5 if "every 2nd" in kind else 1.0
    notes, adapters, dtype = text.get("notes", ""), text.get("method") != "full", text.get("param_dtype", "")
    kernels = re.search(r"fused [^;]*(RMSNorm|SwiGLU|RoPE)", notes) is not None
    return Program(
        checkpointed=share,
        fused="all" if "TE" in text.get("attention", "") else "kernels" if kernels else "none",
        experts="grouped" if re.search(r"scattermoe|grouped|TE\+", notes) else "looped",
        # PEFT casts adapters to fp32 unless told otherwise; fused LoRA kernels and trainers with LoRA code of
        # their own do not
        fp32_adapters=adapters
        and not (kernels and text.get("method") == "qlora")
        and text.get("source", "") not in _OWN_LORA
        and not text["sharding"].startswith("ZeRO"),  # DeepSpeed casts all of the model
        # PEFT's wrapping policy for FSDP makes a unit of every adapter matrix
        adapter_units=adapters and "FSDP1" in text["sharding"] and text.get("source", "") not in _OWN_LORA,
        engine=text.get("sharding_norm", "") if text["sharding"].startswith("ZeRO") else "",
        paged="Paged" in text.get("optimizer", ""),
        autocast="autocast" in text.get("precision", ""),
        fp32_residual="fp32 upcast" in dtype or (dtype == "fp32" and "autocast" in text.get("precision", "")),
    )
