"""A transformers model folder -> one GGUF file, through the `gguf` package.

Families whose tensors GGUF holds as they are, or with one of the changes that are made here: Llama's rotary pairs
lie next to each other in GGUF and half a head apart in transformers; Gemma's norms multiply by 1 + weight in
transformers and by the weight in GGUF. Names of tensors are the package's own map. Tokenizers: see gguf_tokenizer.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open

from shardwise.errors import MissingDependencyError, RuleError
from shardwise.training.export.gguf_tokenizer import write_tokenizer


@dataclass(frozen=True)
class Family:
    """How llama.cpp's architecture `arch` differs from transformers' model of that type."""

    arch: str
    pairs: bool = False  # rotary pairs are neighbours
    norm_plus_one: bool = False


FAMILIES = {
    "llama": Family("LLAMA", pairs=True),
    "mistral": Family("LLAMA", pairs=True),
    "qwen2": Family("QWEN2"),
    "qwen3": Family("QWEN3"),
    "phi3": Family("PHI3"),
    "gemma2": Family("GEMMA2", norm_plus_one=True),
    "gemma3_text": Family("GEMMA3", norm_plus_one=True),
}
TYPES = ("f16", "q8_0")


def write_gguf(model: Path, target: Path, kind: str, name: str) -> None:
    """Write `model` (config, safetensors, tokenizer.json) to `target`. `kind`: f16 or q8_0; norms stay fp32.

    Raises RuleError for a family that is not in FAMILIES, MissingDependencyError without `gguf`.
    """
    try:
        import gguf
    except ImportError:
        raise MissingDependencyError(
            "--to gguf needs the package gguf", "it is not installed", "pip install 'shardwise[export]'"
        ) from None
    config = json.loads((model / "config.json").read_text())
    family = FAMILIES.get(str(config.get("model_type")))
    if family is None:
        raise RuleError(
            f"a model of type '{config.get('model_type')}' cannot be written as GGUF here",
            f"the families that can be checked by reading them back are: {', '.join(sorted(FAMILIES))}",
            "use --to merged, and llama.cpp's own convert_hf_to_gguf.py on the result",
        )
    arch = getattr(gguf.MODEL_ARCH, family.arch)
    writer = gguf.GGUFWriter(target, gguf.MODEL_ARCH_NAMES[arch])
    _write_config(writer, config, name, kind, gguf)
    write_tokenizer(writer, model, config["vocab_size"])
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    for key, tensor in _tensors(model):
        if key == "lm_head.weight" and config.get("tie_word_embeddings"):
            continue
        mapped = names.get_name(key, try_suffixes=(".weight", ".bias"))
        if mapped is None:
            raise RuleError(
                f"tensor '{key}' has no place in a GGUF file of '{config['model_type']}'",
                "the gguf package knows no name for it",
                "use --to merged instead",
            )
        array = tensor.float().numpy()
        if family.pairs:
            array = _pairs(key, array, config)
        if family.norm_plus_one and key.endswith("norm.weight"):
            array = array + 1
        _add(writer, mapped, array, kind, gguf)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_config(writer: Any, config: dict[str, Any], name: str, kind: str, gguf: Any) -> None:
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    rope = config.get("rope_parameters") or {}
    rope = rope.get("full_attention", rope)  # Gemma 3 has one for each kind of layer
    writer.add_name(name)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.get("num_key_value_heads") or heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(float(config.get("rope_theta") or rope.get("rope_theta") or 10000.0))
    share = config.get("partial_rotary_factor") or rope.get("partial_rotary_factor") or 1.0
    writer.add_rope_dimension_count(int(head_dim * share))
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_vocab_size(config["vocab_size"])
    if config.get("sliding_window") and config.get("use_sliding_window", True):
        writer.add_sliding_window(config["sliding_window"])
    if config.get("attn_logit_softcapping"):
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
    if config.get("final_logit_softcapping"):
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    if rope.get("rope_type", "default") != "default" or config.get("rope_scaling"):
        raise RuleError(
            "this model scales its rotary positions",
            "that is not written to GGUF here",
            "use --to merged, and llama.cpp's own convert_hf_to_gguf.py on the result",
        )
    types = {"f16": gguf.LlamaFileType.MOSTLY_F16, "q8_0": gguf.LlamaFileType.MOSTLY_Q8_0}
    writer.add_file_type(types[kind])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)


def _tensors(model: Path) -> Iterator[tuple[str, torch.Tensor]]:
    for path in sorted(model.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118
                yield key, file.get_tensor(key)


def _pairs(key: str, array: np.ndarray, config: dict[str, Any]) -> np.ndarray:
    """Rows of q and k so that the two halves of a rotary pair are neighbours: (heads, 2, half, ...) -> swapped."""
    heads = config["num_attention_heads"]
    count = {"q_proj": heads, "k_proj": config.get("num_key_value_heads") or heads}
    part = next((count[p] for p in count if f".{p}." in key), None)
    if part is None:
        return array
    return (
        array.reshape(part, 2, array.shape[0] // part // 2, *array.shape[1:])
        .swapaxes(1, 2)
        .reshape(array.shape)
    )


def _add(writer: Any, name: str, array: np.ndarray, kind: str, gguf: Any) -> None:
    array = np.ascontiguousarray(array)
    if array.ndim == 1:
        writer.add_tensor(name, array.astype(np.float32))
    elif kind == "q8_0" and array.shape[-1] % 32 == 0:
        packed = gguf.quants.quantize(array, gguf.GGMLQuantizationType.Q8_0)
        writer.add_tensor(name, packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    else:
        writer.add_tensor(name, array.astype(np.float16))
