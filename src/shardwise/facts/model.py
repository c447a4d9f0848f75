"""A model's shape: from config.json and safetensors headers, from the hub, or from the built-in catalogue.

Code that a model folder brings along is never imported: a shape is read, not run.
"""

import json
from dataclasses import replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from shardwise.errors import ModelError, nearest
from shardwise.facts import headers
from shardwise.facts.families import FAMILIES, PLAIN_MLP, tensor_groups
from shardwise.facts.hybrid_families import lfm2_width
from shardwise.facts.shape import ATTENTION_MODULES, ModelShape
from shardwise.facts.tensors import (
    Config,
    TensorGroup,
    attention_layers,
    experts,
    head_dim,
    kv_heads,
    moe_layers,
)

__all__ = ["ATTENTION_MODULES", "ModelShape", "TensorGroup", "read_model", "shape_from_config"]

# Spellings of other families -> the one used here.
_ALIASES = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_positions": "max_position_embeddings",
    "d_model": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "max_seq_len": "max_position_embeddings",
    "seq_length": "max_position_embeddings",
}
_NEEDED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
# null in config.json means "none of it" here, not "the default".
_NULL_MATTERS = ("q_lora_rank", "sliding_window")
_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


def read_model(source: str, revision: str | None = None) -> ModelShape:
    """The shape of a local folder, a config.json, or a hub id (its config and headers; never weights).

    Raises ModelError when there is no config, when the family is unknown and no headers tell its shape, or
    when a hub id can be reached neither on the hub nor in the catalogue.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        return _read_folder(path)
    if path.is_file():
        if path.suffix != ".json":
            raise ModelError(
                f"'{source}' is not a model", "it is a file, but not a config.json",
                "give the folder of the model, its config.json, or a hub id like Qwen/Qwen3-8B",
            )  # fmt: skip
        return shape_from_config(_load_json(path), source)
    if _looks_like_path(source):
        here = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
        close = nearest(path.name, here)
        raise ModelError(
            f"model '{source}' does not exist",
            f"no such file or folder in '{path.parent}'" if here else f"there is no folder '{path.parent}'",
            f"did you mean {path.parent / close[0]}?"
            if close
            else "give a folder, a config.json, or a hub id",
        )
    from shardwise.facts import hub  # the hub's client is only needed here

    return hub.read_hub_model(source, revision)


def _looks_like_path(source: str) -> bool:
    return source.startswith((".", "/", "~")) or source.count("/") > 1 or source.endswith(".json")


def _load_json(path: Path) -> Config:
    try:
        config = json.loads(path.read_text(encoding="utf-8-sig"))
    except (ValueError, OSError) as problem:
        raise ModelError(
            f"{path} cannot be read", str(problem), "it must be the model's config.json"
        ) from None
    if not isinstance(config, dict):
        raise ModelError(
            f"{path} is not a model's config", "it holds no keys and values", "give a config.json"
        )
    return config


def _read_folder(folder: Path) -> ModelShape:
    file = folder / "config.json"
    if not file.is_file():
        adapter = folder / "adapter_config.json"
        if adapter.is_file():
            base = _load_json(adapter).get("base_model_name_or_path", "its base model")
            raise ModelError(
                f"'{folder}' holds an adapter, not a model",
                "an adapter has no shape of its own",
                f"plan its base: {base}",
            )
        inside = ", ".join(sorted(p.name for p in folder.iterdir())[:6]) or "nothing"
        raise ModelError(
            f"model folder '{folder}' has no config.json",
            f"the folder holds: {inside}",
            "give the folder that has config.json and the *.safetensors files",
        )
    template = (folder / "chat_template.jinja").is_file() or (folder / "chat_template.json").is_file()
    tokenizer = folder / "tokenizer_config.json"
    if not template and tokenizer.is_file():
        template = bool(_load_json(tokenizer).get("chat_template"))
    return shape_from_config(_load_json(file), str(folder), headers.folder_headers(folder), template)


@cache
def _defaults() -> dict[str, Config]:
    text = files("shardwise.facts").joinpath("config_defaults.json").read_text(encoding="utf-8")
    families: dict[str, Config] = json.loads(text)["families"]
    return families


def fill_defaults(config: Config) -> Config:
    """A text model's config in this project's spellings, with its family's defaults where it is silent."""
    family = {"gemma3": "gemma3_text", "llama4": "llama4_text"}.get(
        str(config.get("model_type")), config.get("model_type")
    )
    merged = {
        **_defaults().get(str(family), {}),
        **{k: v for k, v in config.items() if v is not None or k in _NULL_MATTERS},
    }
    for foreign, ours in _ALIASES.items():
        if foreign in config and config.get(ours) is None:
            merged[ours] = config[foreign]
        elif foreign in merged:
            merged.setdefault(ours, merged[foreign])
    merged["model_type"] = family
    merged.setdefault("tie_word_embeddings", True)
    return merged


def shape_from_config(
    config: Config,
    source: str,
    header: dict[str, Any] | None = None,
    has_chat_template: bool | None = None,
) -> ModelShape:
    """config.json's contents, and the files' merged safetensors header (the truth if present) -> shape."""
    notes: list[str] = []
    text = config.get("text_config") or config.get("llm_config") or config
    wrapper = text is not config
    if wrapper:
        text = {"model_type": config.get("model_type"), **text}
        if "tie_word_embeddings" in config:
            text.setdefault("tie_word_embeddings", config["tie_word_embeddings"])
    filled = fill_defaults(text)
    family = str(filled["model_type"])
    missing = [key for key in _NEEDED if not isinstance(filled.get(key), int) or filled[key] <= 0]
    if missing:
        raise ModelError(
            f"the config of '{source}' does not describe a language model",
            f"it says nothing usable about {', '.join(missing)}",
            "shardwise plans decoder-only text models; give the config.json of one",
        )
    if family in FAMILIES:
        _check_divides(filled, source)
        groups = tensor_groups(filled, _vision_config(config, notes))
        if header:
            groups = _compare(groups, header, notes)
    elif header:
        groups = headers.groups_from_header(header)
        notes.append(f"family '{family}' has no formulas here: counts come from the files' headers")
    else:
        close = nearest(family, FAMILIES)
        raise ModelError(
            f"model family '{family}' is not known, and '{source}' has no safetensors files to read it from",
            "parameters of a family without formulas come from the headers of its files",
            "give the folder with the *.safetensors files"
            + (f"; the nearest known family is {close[0]}" if close else ""),
        )
    if "auto_map" in config:
        notes.append("the model brings code of its own (auto_map): it was not run; training needs "
                     "model.trust_remote_code: true")  # fmt: skip
    return _shape(source, config, filled, groups, header, has_chat_template, notes)


def _check_divides(c: Config, source: str) -> None:
    latent = c.get("kv_lora_rank")  # heads of their own size
    if not latent and not c.get("head_dim") and c["hidden_size"] % c["num_attention_heads"]:
        raise ModelError(
            f"the config of '{source}' is not consistent",
            f"hidden_size {c['hidden_size']} is not a multiple of "
            f"num_attention_heads {c['num_attention_heads']}, and there is no head_dim",
            "check config.json",
        )


def _vision_config(config: Config, notes: list[str]) -> Config | None:
    vision = config.get("vision_config")
    if not isinstance(vision, dict):
        return None
    if config.get("model_type") == "gemma3":
        return {**_defaults()["siglip_vision_model"], **vision}
    notes.append("only the text model is counted: the vision tower's size is read from safetensors files")
    return None


def _compare(
    groups: tuple[TensorGroup, ...], header: dict[str, Any], notes: list[str]
) -> tuple[TensorGroup, ...]:
    """The files' count is the truth: where it differs, their groups replace those of the formulas."""
    stored = headers.stored_parameters(header)
    expected = sum(t.parameters for t in groups)
    if stored is None:
        notes.append("the files are quantised: parameters are counted from config.json")
    elif stored != expected:
        if stored - expected in {t.parameters for t in groups if t.kind == "embedding"}:
            notes.append("the files also store the tied output matrix; it is counted once")
        else:
            notes.append(
                f"the files hold {stored:,} parameters, config.json says {expected:,}: the files are used"
            )
            return headers.groups_from_header(header)
    return groups


def _windows(c: Config) -> tuple[int | None, int]:
    """Sliding window (tokens) and the number of layers with full attention."""
    layers, family = c["num_hidden_layers"], c["model_type"]
    window = c.get("sliding_window")
    if family in ("qwen3_next", "lfm2", "lfm2_moe"):
        return None, attention_layers(c)
    if not window or c.get("use_sliding_window") is False:
        return None, layers
    kinds = c.get("layer_types")
    if kinds:
        full = sum(kind == "full_attention" for kind in kinds)
    elif family in ("gemma2", "gpt_oss"):
        full = layers // 2
    elif family in ("gemma3_text", "cohere2", "olmo3"):
        full = layers // int(c.get("sliding_window_pattern") or (6 if family == "gemma3_text" else 4))
    elif c.get("max_window_layers") is not None and family.startswith("qwen"):
        full = min(int(c["max_window_layers"]), layers)
    else:
        full = 0
    return (int(window), full) if full < layers else (None, layers)


def _shape(
    source: str,
    config: Config,
    c: Config,
    groups: tuple[TensorGroup, ...],
    header: dict[str, Any] | None,
    has_chat_template: bool | None,
    notes: list[str],
) -> ModelShape:
    sparse, count = moe_layers(c), experts(c)
    per_token = int(c.get("num_experts_per_tok") or c.get("num_experts_per_token") or 0)
    width = int(c.get("moe_intermediate_size") or c.get("intermediate_size") or 0)
    shared = int(
        c.get("shared_expert_intermediate_size")
        or c.get("shared_intermediate_size")
        or (c.get("n_shared_experts") or 0) * width
        or (width if c["model_type"] == "llama4_text" else 0)
    )
    total = sum(t.parameters for t in groups)
    idle = (
        sum(t.parameters for t in groups if t.kind == "expert") * (count - per_token) // count if count else 0
    )
    window, full = _windows(c)
    dtype = str(config.get("torch_dtype") or config.get("dtype") or c.get("torch_dtype") or c.get("dtype"))
    kv = kv_heads(c)
    if c["model_type"] == "gpt_bigcode" and c.get("multi_query", True):
        kv = 1
    elif c["model_type"] == "falcon":
        new = c.get("new_decoder_architecture")
        kv = int(c.get("num_kv_heads") or c["num_attention_heads"]) if new else 1
    hidden = c["hidden_size"]
    return ModelShape(
        source=source,
        model_type=str(config.get("model_type")),
        family=c["model_type"],
        hidden_size=hidden,
        num_hidden_layers=c["num_hidden_layers"],
        num_attention_heads=c["num_attention_heads"],
        num_key_value_heads=kv,
        head_dim=int(c["v_head_dim"]) if c.get("kv_lora_rank") else head_dim(c),
        intermediate_size=_width(c),
        vocab_size=c["vocab_size"],
        tie_word_embeddings=bool(c["tie_word_embeddings"]),
        max_position_embeddings=int(c.get("max_position_embeddings") or 2048),
        mlp="plain" if c["model_type"] in PLAIN_MLP else "gated",
        num_experts=count if sparse else 0,
        experts_per_token=per_token if sparse else 0,
        moe_intermediate_size=width if sparse else 0,
        shared_expert_intermediate_size=shared if sparse else 0,
        moe_layers=sparse,
        sliding_window=window,
        full_attention_layers=full,
        dtype=(headers.stored_dtype(header) if header else None) or _DTYPES.get(dtype, "bf16"),
        has_chat_template=has_chat_template,
        needs_own_code="auto_map" in config,
        tensors=groups,
        total_parameters=total,
        active_parameters=total - idle,
        notes=tuple(notes),
    )


def _width(c: Config) -> int:
    """MLP width of the dense layers."""
    family = c["model_type"]
    if family == "llama4_text":
        return int(c.get("intermediate_size_mlp") or c["intermediate_size"])
    if family == "mpt":
        return int(c["expansion_ratio"] * c["hidden_size"])
    if family == "lfm2":
        return lfm2_width(c)
    named = c.get("intermediate_size") or c.get("n_inner") or c.get("ffn_dim") or c.get("ffn_hidden_size")
    return int(named or 4 * c["hidden_size"])


def with_note(shape: ModelShape, note: str) -> ModelShape:
    """The same shape, and one more thing to tell the reader."""
    return replace(shape, notes=(*shape.notes, note))
