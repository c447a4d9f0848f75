"""Shapes and dtypes out of safetensors headers: a few kilobytes per file, never the weights.

Format: 8 bytes little-endian header length, then that many bytes of JSON
(https://huggingface.co/docs/safetensors, "Format").
"""

import json
import re
import struct
from math import prod
from pathlib import Path
from typing import Any

from shardwise.errors import ModelError
from shardwise.facts.tensors import Kind, TensorGroup

_MAX_HEADER_BYTES = 100_000_000  # the limit of the reference implementation
_FLOATS = {"F64", "F32", "F16", "BF16"}
# Stored by some files, parameters of no model: rotary tables, causal masks, scales of quantised tensors.
_NOT_PARAMETERS = re.compile(r"inv_freq|masked_bias|\.attn\.bias$|_scale(_inv)?$|e_score_correction_bias")


def read_header(path: Path) -> dict[str, Any]:
    """One file's header: name -> {"dtype", "shape", "data_offsets"}. Raises ModelError on a broken file."""
    with path.open("rb") as file:
        head = file.read(8)
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
        if not 0 < length <= _MAX_HEADER_BYTES:
            raise ModelError(
                f"{path} is not a safetensors file",
                f"its header claims {length} bytes" if head else "it is empty",
                "download it again; a Git LFS pointer looks like this too (git lfs pull)",
            )
        try:
            header: dict[str, Any] = json.loads(file.read(length))
        except ValueError as problem:
            raise ModelError(
                f"{path} has a broken header", str(problem), "the download is incomplete: fetch it again"
            ) from None
    header.pop("__metadata__", None)
    return header


def folder_headers(folder: Path) -> dict[str, Any]:
    """The merged headers of a folder's safetensors files; empty when it has none."""
    merged: dict[str, Any] = {}
    for path in sorted(folder.glob("*.safetensors")):
        if not path.name.startswith("adapter"):
            merged |= read_header(path)
    return merged


def stored_parameters(header: dict[str, Any]) -> int | None:
    """Count of parameters the files hold; None when they are quantised, where elements are no parameters."""
    total = 0
    for name, tensor in header.items():
        if _NOT_PARAMETERS.search(name):
            continue
        if tensor["dtype"] not in _FLOATS and not tensor["dtype"].startswith("F8"):
            return None
        total += prod(tensor["shape"])
    return total


def stored_dtype(header: dict[str, Any]) -> str | None:
    """The dtype that most bytes have: bf16, fp16, fp32, fp8 ..."""
    sizes: dict[str, int] = {}
    for tensor in header.values():
        begin, end = tensor["data_offsets"]
        sizes[tensor["dtype"]] = sizes.get(tensor["dtype"], 0) + end - begin
    names = {"BF16": "bf16", "F16": "fp16", "F32": "fp32", "F8_E4M3": "fp8", "U8": "uint8"}
    most = max(sizes, key=lambda k: sizes[k], default=None)
    return None if most is None else names.get(most, most.lower())


def groups_from_header(header: dict[str, Any]) -> tuple[TensorGroup, ...]:
    """Groups of a family we have no formulas for, told apart by name and rank of each tensor."""
    found: dict[tuple[str, tuple[int, ...]], int] = {}
    for name, tensor in header.items():
        if not _NOT_PARAMETERS.search(name):
            key = (re.sub(r"\.\d+(?=\.)", ".*", name), tuple(tensor["shape"]))
            found[key] = found.get(key, 0) + 1
    groups = []
    for (name, shape), count in found.items():
        parts = [p for p in name.split(".") if p not in ("weight", "bias")]
        vision = any(p in name for p in ("vision", "visual", "image", "audio"))
        part = "vision" if vision else "text"
        groups.append(
            TensorGroup(name, parts[-1], _kind(name, shape), shape, count, ".*" in name, part)  # type: ignore[arg-type]
        )
    return tuple(groups)


def _kind(name: str, shape: tuple[int, ...]) -> Kind:
    if name.endswith(".bias"):
        return "bias"
    if ".experts." in name:
        return "expert"
    if len(shape) < 2:
        return "norm"
    if re.search(r"lm_head|embed_out|output\.weight$", name):
        return "head"
    if re.search(r"embed|wte|wpe", name):
        return "embedding"
    if re.search(r"router|mlp\.gate\.weight$", name):
        return "router"
    return "linear" if len(shape) == 2 else "norm"
