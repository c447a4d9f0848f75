"""Cells of a table of measured runs, as people spell them -> as `rows` reads them.

Only spelling changes: a cell that says something else than what is known stays as it is, and the row is declined
for it.
"""

import re
from collections.abc import Mapping
from typing import Any

_COUNTS = (
    "num_gpus",
    "gpus_per_node",
    "micro_batch_per_gpu",
    "grad_accum",
    "lora_rank",
    "tp",
    "pp",
    "cp",
    "ep",
    "gpu_mem_gb",
)
_WORDS = ("mem_usable", "tput_usable", "outcome", "quant", "compile")
_YES, _NO = ("yes", "true", "on", "y", "1"), ("no", "false", "off", "n", "0", "-", "n/a", "na", "none", "")


def number(value: str | None) -> float | None:
    """The first number in a cell: '2,048 tokens', '4k', '~16.5', '8x'. None where there is none."""
    match = re.search(r"(?<![\w.])(\d[\d,]*(?:\.\d+)?|\.\d+)\s*([kK](?![a-zA-Z]))?", value or "")
    if match is None:
        return None
    size = float(match.group(1).replace(",", ""))
    return size * 1024 if match.group(2) else size


def whole(value: str | None) -> int | None:
    """A count; of '2x8' the product."""
    parts = re.fullmatch(r"\s*(\d+)\s*[x×*]\s*(\d+)\D*", value or "")
    if parts:
        return int(parts.group(1)) * int(parts.group(2))
    found = number(value)
    return None if found is None else int(found)


def clean(raw: Mapping[str, Any]) -> dict[str, str]:
    """One line of the table with every cell a string in the spelling that `rows` and the programs know."""
    text = {k.strip(): (v if isinstance(v, str) else "").strip() for k, v in raw.items() if k}
    for column in _WORDS:
        if column in text:
            text[column] = text[column].casefold()
    _counts(text)
    _method(text)
    _sharding(text)
    checkpointing = text.get("act_ckpt", "").casefold()
    text["act_ckpt"] = "full" if checkpointing in _YES else "none" if checkpointing in _NO else checkpointing
    if text.get("compile", "") in _NO:
        text["compile"] = "no"
    elif text.get("compile", "") in _YES:
        text["compile"] = "yes"
    for column, nothing in (("fused_ce", "no"), ("cpu_offload", "none")):
        text[column] = nothing if text.get(column, "").casefold() in _NO else text[column]
    if text.get("attention", "").casefold().startswith("eager"):
        text["attention"] = "eager"
    for column in ("precision", "param_dtype"):
        text[column] = re.sub(r"(?i)(bf|fp)(16|32|8)", lambda m: m.group(0).lower(), text.get(column, ""))
    text["mem_kind"] = text.get("mem_kind", "").casefold()
    if re.search(r"oom|out.of.memory", text.get("outcome", "")):
        text["outcome"] = "oom"
    return text


def gpu_spellings(name: str, memory_gb: str = "") -> list[str]:
    """A GPU's name as it stands, without a count before it or its form after it, and with its memory."""
    bare = re.sub(r"^\s*\d+\s*[x×*]\s*", "", name)
    bare = re.sub(r"\(.*?\)|\bGPUs?\b", " ", bare)
    plain = re.sub(r"(?i)[\s_-]*\b(sxm\d?|pcie|hbm\w*|nvlink|tensor core|laptop)\b", " ", bare)
    found = [name, bare, plain]
    if memory_gb:
        found.append(f"{plain.strip()}-{memory_gb}GB")
    return [each.strip() for each in found if each.strip()]


def _counts(text: dict[str, str]) -> None:
    for column in _COUNTS:
        of_all = column == "micro_batch_per_gpu" and "global" in text.get(column, "")
        if text.get(column) and not text[column].isdigit() and not of_all:
            found = whole(text[column])
            text[column] = "" if found is None else str(found)
    length = number(text.get("seq_len"))
    text["seq_len"] = "" if length is None else str(int(length))
    batch = text.get("micro_batch_per_gpu", "")
    if "global" in batch:  # of all ranks and micro-batches of a step
        found, ranks = whole(batch), whole(text.get("num_gpus")) or 1
        steps = whole(text.get("grad_accum")) or 1
        text["micro_batch_per_gpu"] = "" if found is None else str(max(1, found // (ranks * steps)))


def _method(text: dict[str, str]) -> None:
    """full, lora or qlora; adapters on a base in 4 or 8 bits are qlora whatever the column calls them."""
    method = text.get("method", "").casefold()
    quantised = re.search(r"nf4|fp4|int4|int8|4.?bit|8.?bit|gptq|awq|hqq", text.get("quant", "")) is not None
    if "qlora" in method or (quantised and "lora" in method):
        text["method"] = "qlora"
    elif re.search("lora|dora", method):
        text["method"] = "lora"
    elif re.search(r"full|fft|^sft$|pre-?train", method):
        text["method"] = "full"


def _sharding(text: dict[str, str]) -> None:
    """FSDP, FSDP1, FSDP2, ZeRO-n, none; others as they stand."""
    name = text.get("sharding", "")
    plain = name.casefold()
    stage = re.search(r"zero[\s_-]*(?:stage[\s_-]*)?([0-3])", plain)
    if plain in _NO or plain == "single":
        text["sharding"] = "none"
    elif re.fullmatch(r"(?:deepspeed\s*\W*\s*)?zero[\s_-]*(?:stage[\s_-]*)?[0-3].*", plain) and stage:
        text["sharding"] = (
            f"ZeRO-{stage.group(1)}" + (name[plain.find(stage.group(0)) + len(stage.group(0)) :])
        )
        text.setdefault("sharding_norm", "")
        if not text["sharding_norm"] and stage.group(1) != "0":
            text["sharding_norm"] = f"zero{stage.group(1)}"
    elif plain.startswith("fsdp"):
        text["sharding"] = re.sub(r"(?i)^fsdp(?:[\s_-]*v?(?=[12]\b))?", "FSDP", name)
