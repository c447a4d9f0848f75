"""Counts from config.json against transformers' own classes, built on the meta device."""

from collections import Counter
from typing import Any

import pytest

from shardwise.facts.catalogue import catalogue_shape
from shardwise.facts.families import FAMILIES
from shardwise.facts.model import fill_defaults, shape_from_config

OWN_CODE = {"qwen", "baichuan", "chatglm"}  # not in transformers: their counts are pinned below
SMALL: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 101,
    "max_position_embeddings": 64,
}
MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
MLA = {
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 12,
    "n_routed_experts": 6,
}
# family -> the settings tried, each on top of SMALL
VARIANTS: dict[str, list[dict[str, Any]]] = {
    "llama": [{"attention_bias": True, "mlp_bias": True}, {"head_dim": 20, "tie_word_embeddings": True}],
    "ministral": [{"head_dim": 16}],
    "mistral": [{"head_dim": 16}],
    "qwen2": [{"tie_word_embeddings": True}],
    "qwen2_moe": [
        MOE | {"num_experts": 5, "shared_expert_intermediate_size": 40},
        MOE | {"num_experts": 5, "shared_expert_intermediate_size": 40, "decoder_sparse_step": 2},
        MOE | {"num_experts": 5, "shared_expert_intermediate_size": 40, "mlp_only_layers": [0]},
    ],
    "qwen3": [{"head_dim": 20}, {"head_dim": 20, "attention_bias": True}],
    "qwen3_moe": [MOE | {"num_experts": 5, "head_dim": 20}],
    "gemma2": [{"head_dim": 20}],
    "gemma3_text": [{"head_dim": 20}],
    "phi": [{"qk_layernorm": True}, {"tie_word_embeddings": True}],
    "phi3": [{"pad_token_id": 0}],
    "gpt2": [{"n_inner": 70}],
    "opt": [
        {"ffn_dim": 96, "word_embed_proj_dim": 32},
        {"do_layer_norm_before": False, "enable_bias": False},
    ],
    "falcon": [
        {"new_decoder_architecture": True, "num_kv_heads": 2},
        {"multi_query": False, "parallel_attn": False, "bias": True},
    ],
    "mixtral": [{"num_local_experts": 4}],
    "deepseek_v2": [MOE | MLA | {"first_k_dense_replace": 1, "q_lora_rank": 16}],
    "deepseek_v3": [
        MOE | MLA | {"first_k_dense_replace": 1, "q_lora_rank": None, "n_group": 1, "topk_group": 1},
    ],
    "gpt_oss": [{"num_local_experts": 4, "head_dim": 12}],
    "olmoe": [{"num_experts": 4}],
    "granitemoe": [{"num_local_experts": 4}],
    "granitemoeshared": [{"num_local_experts": 4, "shared_intermediate_size": 36}],
    "cohere": [{"use_qk_norm": True}],
    "glm": [{"head_dim": 12, "pad_token_id": 0}],
    "glm4": [{"head_dim": 12, "pad_token_id": 0}],
    "glm4_moe": [
        MOE | {"n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, "head_dim": 12},
        MOE | {"n_routed_experts": 4, "use_qk_norm": True, "attention_bias": True, "head_dim": 12},
    ],
    "stablelm": [{"use_qkv_bias": True, "qk_layernorm": True}, {"use_parallel_residual": True}],
    "nemotron": [{"head_dim": 12, "attention_bias": True, "mlp_bias": True}],
    "starcoder2": [{"use_bias": False}],
    "hunyuan_v1_dense": [{"head_dim": 12}],
    "llama4_text": [
        {"num_local_experts": 4, "head_dim": 12, "interleave_moe_layer_step": 2, "intermediate_size_mlp": 60}
    ],
    "glm4_moe_lite": [
        MOE
        | MLA
        | {"q_lora_rank": 16, "num_key_value_heads": 4, "mlp_layer_types": ["dense", "sparse", "sparse"]}
    ],
    "qwen3_next": [
        MOE
        | {
            "num_experts": 4,
            "shared_expert_intermediate_size": 40,
            "head_dim": 12,
            "num_hidden_layers": 4,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 6,
            "linear_value_head_dim": 10,
        },
    ],
    "lfm2": [{"layer_types": ["conv", "full_attention", "conv"], "block_multiple_of": 16}],
    "lfm2_moe": [
        MOE | {"num_experts": 4, "num_dense_layers": 1, "layer_types": ["conv", "full_attention", "conv"]}
    ],
    "seed_oss": [{"head_dim": 12}],
}
CASES = [
    (family, variant)
    for family in FAMILIES
    if family not in OWN_CODE
    for variant in (
        (
            [{}]
            if family
            not in (
                "hunyuan_v1_dense",
                "glm",
                "glm4",
                "nemotron",
                "ministral",
                "glm4_moe_lite",
                "qwen3_next",
                "lfm2_moe",
            )
            else []
        )
        + VARIANTS.get(family, [])
    )
]
REAL = """
    meta-llama/Llama-3.1-8B meta-llama/Llama-3.2-1B mistralai/Mistral-7B-v0.3 Qwen/Qwen2.5-0.5B Qwen/Qwen3-4B
    Qwen/Qwen3-30B-A3B Qwen/Qwen1.5-MoE-A2.7B google/gemma-2b google/gemma-2-2b google/gemma-3-270m
    google/gemma-3-4b-it microsoft/phi-2 microsoft/Phi-3-mini-4k-instruct HuggingFaceTB/SmolLM3-3B gpt2
    EleutherAI/pythia-1b facebook/opt-125m tiiuae/falcon-7b tiiuae/falcon-40b bigscience/bloom-7b1
    mistralai/Mixtral-8x7B-v0.1 deepseek-ai/DeepSeek-V2-Lite deepseek-ai/DeepSeek-V3 openai/gpt-oss-20b
    allenai/OLMo-2-1124-7B ibm/PowerLM-3b ibm-granite/granite-3.0-3b-a800m-base CohereLabs/aya-expanse-8b
    Qwen/Qwen3-Next-80B-A3B-Instruct LiquidAI/LFM2-8B-A1B zai-org/GLM-4.7-Flash
    THUDM/GLM-4-9B-0414 zai-org/GLM-4.5-Air bigcode/starcoder2-7b stabilityai/stablelm-2-1_6b
    mosaicml/mpt-7b nvidia/nemotron-4-8b ByteDance-Seed/Seed-OSS-36B-Base moonshotai/Moonlight-16B-A3B
""".split()  # noqa: SIM905


def build(config: dict[str, Any]) -> Any:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = dict(config)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(config.pop("model_type"), **config))


def linears(model: Any) -> Counter[tuple[int, ...]]:
    """Shapes (out, in) of what adapters fit on, over text and vision."""
    from torch import nn

    head = model.get_output_embeddings()
    found: Counter[tuple[int, ...]] = Counter()
    for module in model.modules():
        conv = type(module).__name__ == "Conv1D"
        if (isinstance(module, nn.Linear) or conv) and module is not head:
            found[tuple(module.weight.shape[::-1] if conv else module.weight.shape)] += 1
    return found


def ours(shape: Any) -> Counter[tuple[int, ...]]:
    found: Counter[tuple[int, ...]] = Counter()
    for group in shape.tensors:
        if group.kind == "linear":
            found[group.shape] += group.count
    return found


def check(config: dict[str, Any]) -> None:
    model, shape = build(config), shape_from_config(config, "test")
    assert shape.total_parameters == sum(p.numel() for p in model.parameters())
    assert ours(shape) == linears(model)


@pytest.mark.parametrize(("family", "variant"), CASES, ids=[f"{f}-{i}" for i, (f, _) in enumerate(CASES)])
def test_small_config_counts_equal_the_meta_model(family: str, variant: dict[str, Any]) -> None:
    small = dict(SMALL)
    if family in ("gpt2", "gpt_bigcode"):
        small = {"n_embd": 48, "n_layer": 3, "n_head": 4, "n_positions": 64, "vocab_size": 101}
    elif family == "mpt":
        small = {"d_model": 48, "n_layers": 3, "n_heads": 4, "max_seq_len": 64, "vocab_size": 101}
    elif family == "bloom":
        small = {"hidden_size": 48, "n_layer": 3, "n_head": 4, "vocab_size": 101}
    elif family == "opt":
        small |= {"ffn_dim": 96, "word_embed_proj_dim": 48}
    elif family in ("qwen2_moe", "qwen3_moe") and not variant:
        variant = MOE | {"num_experts": 4, "head_dim": 12}
    elif family in ("deepseek_v2", "deepseek_v3") and not variant:
        variant = MOE | MLA
    if family not in ("gpt2", "gpt_bigcode", "mpt", "bloom") and "pad_token_id" not in variant:
        small["pad_token_id"] = 0
    check({"model_type": family, "bos_token_id": 1, "eos_token_id": 2, **small, **variant})


@pytest.mark.parametrize("name", REAL)
def test_catalogue_counts_equal_the_meta_model(name: str) -> None:
    import json
    from importlib.resources import files

    records = json.loads(files("shardwise.facts").joinpath("models.json").read_text())
    record = next(r for key, r in records.items() if name in (key, *r["also"]))
    config = dict(record["config"])
    check(config)


@pytest.mark.parametrize(
    ("name", "billions"),
    [("Qwen/Qwen-7B-Chat", 7.721), ("baichuan-inc/Baichuan2-13B-Base", 13.897), ("THUDM/chatglm3-6b", 6.244)],
)
def test_families_with_own_code_match_their_published_size(name: str, billions: float) -> None:
    shape = catalogue_shape(name)
    assert shape is not None
    assert round(shape.total_parameters / 1e9, 3) == billions


def test_defaults_are_those_of_the_installed_transformers() -> None:
    """A silent config.json means today's transformers defaults; a new version that moves one shows here."""
    from transformers import AutoConfig

    moved = []
    for family in FAMILIES:
        if family in OWN_CODE:
            continue
        theirs = AutoConfig.for_model(family)
        filled = fill_defaults({"model_type": family})
        for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "tie_word_embeddings"):
            if filled[key] != getattr(theirs, key):
                moved.append((family, key, filled[key], getattr(theirs, key)))
    assert not moved
