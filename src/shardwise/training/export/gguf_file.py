"""A transformers model folder -> one GGUF file, through the `gguf` package.

Families whose tensors GGUF holds as they are, or with the one change that is made here: Llama's rotary pairs
lie next to each other in GGUF and half a head apart in transformers.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open

from shardwise.errors import MissingDependencyError, RuleError

FAMILIES = {"llama": "LLAMA", "mistral": "LLAMA", "qwen2": "QWEN2", "qwen3": "QWEN3"}
TYPES = ("f16", "q8_0")
# tokenizer.ggml.pre, by what only this family's splitting expression has
_SPLITTERS = (("\\p{N}{1,3}", "llama-bpe"), ("\\p{N}", "qwen2"), ('"individual_digits": true', "smollm"))


def write_gguf(model: Path, target: Path, kind: str, name: str) -> None:
    """Write `model` (config, safetensors, tokenizer.json) to `target`. `kind`: f16 or q8_0; norms stay fp32.

    Raises RuleError for a family that is not in FAMILIES, MissingDependencyError without `gguf`.
    """
    try:
        import gguf
    except ImportError:
        raise MissingDependencyError(
            "--to gguf needs the package gguf", "it is not installed", "pip install gguf"
        ) from None
    config = json.loads((model / "config.json").read_text())
    family = config.get("model_type")
    if family not in FAMILIES:
        raise RuleError(
            f"a model of type '{family}' cannot be written as GGUF here",
            f"the families that can be checked by reading them back are: {', '.join(sorted(FAMILIES))}",
            "use --to merged, and llama.cpp's own convert_hf_to_gguf.py on the result",
        )
    arch = getattr(gguf.MODEL_ARCH, FAMILIES[family])
    writer = gguf.GGUFWriter(target, gguf.MODEL_ARCH_NAMES[arch])
    _write_config(writer, config, name, kind, gguf)
    _write_tokenizer(writer, model, config)
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    for key, tensor in _tensors(model):
        if key == "lm_head.weight" and config.get("tie_word_embeddings"):
            continue
        mapped = names.get_name(key, try_suffixes=(".weight", ".bias"))
        if mapped is None:
            raise RuleError(
                f"tensor '{key}' has no place in a GGUF file of '{family}'", "", "use --to merged instead"
            )
        array = tensor.float().numpy()
        if FAMILIES[family] == "LLAMA":
            array = _pairs(key, array, config)
        _add(writer, mapped, array, kind, gguf)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_config(writer: Any, config: dict[str, Any], name: str, kind: str, gguf: Any) -> None:
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    rope = config.get("rope_parameters") or {}
    writer.add_name(name)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.get("num_key_value_heads") or heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(float(config.get("rope_theta") or rope.get("rope_theta") or 10000.0))
    writer.add_rope_dimension_count(head_dim)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_vocab_size(config["vocab_size"])
    if rope.get("rope_type", "default") != "default" or config.get("rope_scaling"):
        raise RuleError(
            "this model scales its rotary positions", "that is not written to GGUF here", "use --to merged"
        )
    types = {"f16": gguf.LlamaFileType.MOSTLY_F16, "q8_0": gguf.LlamaFileType.MOSTLY_Q8_0}
    writer.add_file_type(types[kind])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)


def _write_tokenizer(writer: Any, model: Path, config: dict[str, Any]) -> None:
    """Byte-level BPE, as tokenizer.json holds it; the chat template goes along."""
    from transformers import AutoTokenizer

    text = (model / "tokenizer.json").read_text(encoding="utf-8")
    tree = json.loads(text)
    if tree["model"]["type"] != "BPE" or "ByteLevel" not in text:
        raise RuleError(
            f"a {tree['model']['type']} tokenizer is not written to GGUF here",
            "only byte-level BPE is",
            "use --to merged, and llama.cpp's own convert_hf_to_gguf.py on the result",
        )
    tokens = [f"[PAD{i}]" for i in range(config["vocab_size"])]
    types = [5] * len(tokens)  # unused
    for token, i in tree["model"]["vocab"].items():
        if i < len(tokens):
            tokens[i], types[i] = token, 1  # normal
    for added in tree["added_tokens"]:
        if added["id"] < len(tokens):
            tokens[added["id"]], types[added["id"]] = added["content"], 3 if added["special"] else 4
    merges = [m if isinstance(m, str) else " ".join(m) for m in tree["model"]["merges"]]
    pre = json.dumps(tree.get("pre_tokenizer"), ensure_ascii=False)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(
        next((name for mark, name in _SPLITTERS if mark in pre.replace("\\\\", "\\")), "gpt-2")
    )
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(merges)
    full = AutoTokenizer.from_pretrained(model)
    for number, add in (
        (full.bos_token_id, writer.add_bos_token_id),
        (full.eos_token_id, writer.add_eos_token_id),
        (full.pad_token_id, writer.add_pad_token_id),
    ):
        if number is not None:
            add(number)
    writer.add_add_bos_token(False)
    if isinstance(full.chat_template, str):
        writer.add_chat_template(full.chat_template)


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
