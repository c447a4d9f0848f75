"""Models that take no memory until they are sharded, and weights read row by row."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GPT2Config,
    LlamaConfig,
    MixtralConfig,
    PretrainedConfig,
    Qwen3Config,
)

from shardwise.recipe.schema import Recipe
from shardwise.training.hollow import fill, hollow_model, in_fp32, is_hollow, materialise, stored_name
from shardwise.training.model import ModelFolder

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
FAMILIES: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**{k: v for k, v in SIZES.items() if k != "head_dim"}),
    "llama-3-rope": LlamaConfig(
        **{k: v for k, v in SIZES.items() if k != "head_dim"},
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    ),
    "llama-tied": LlamaConfig(
        **{k: v for k, v in SIZES.items() if k != "head_dim"}, tie_word_embeddings=True
    ),
    "qwen3": Qwen3Config(**SIZES),
    "gemma2": Gemma2Config(**SIZES, sliding_window=16),
    "gpt2": GPT2Config(vocab_size=97, n_embd=32, n_layer=2, n_head=4, n_positions=64),
}


def folder_of(config: PretrainedConfig, path: Path) -> ModelFolder:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    recipe = Recipe.model_validate(
        {
            "model": {"source": str(path)},
            "data": {"train": [{"path": "x"}]},
            "training": {"precision": "bf16"},
        }
    )
    return ModelFolder(path, recipe)


@pytest.mark.parametrize("family", FAMILIES)
def test_filled_it_is_the_loaded_model(family: str, tmp_path: Path) -> None:
    folder = folder_of(FAMILIES[family], tmp_path)
    model = hollow_model(folder)
    assert model is not None
    held = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}
    assert sum(held.values()) <= 8 * len(held) and all(is_hollow(p) for p in model.parameters())
    materialise(model)
    fill(model, folder)
    whole = folder.load()
    expected = dict(whole.named_parameters())
    assert dict(model.named_parameters()).keys() == expected.keys()  # a tied matrix stays one
    for name, param in model.named_parameters():
        assert param.dtype == expected[name].dtype and torch.equal(param, expected[name]), name
    for (name, ours), (_, theirs) in zip(model.named_buffers(), whole.named_buffers(), strict=True):
        assert torch.equal(ours, theirs), name


def test_a_model_whose_files_are_arranged_otherwise_is_left_to_transformers(tmp_path: Path) -> None:
    sizes = {k: v for k, v in SIZES.items() if k != "head_dim"}
    folder = folder_of(MixtralConfig(**sizes, num_local_experts=2, num_experts_per_tok=1), tmp_path)
    assert hollow_model(folder) is None


def test_a_folder_without_safetensors_is_left_to_transformers(tmp_path: Path) -> None:
    folder = folder_of(FAMILIES["llama"], tmp_path)
    (tmp_path / "model.safetensors").unlink()
    assert hollow_model(folder) is None


def test_raising_to_fp32_takes_no_memory_either() -> None:
    hollow = torch.zeros((), dtype=torch.bfloat16).expand(64, 64)
    raised = in_fp32(hollow)
    assert raised.dtype == torch.float32 and raised.shape == (64, 64) and is_hollow(raised)
    assert not is_hollow(in_fp32(torch.ones(3, 3)))


def test_names_in_files_are_those_without_the_wrapping() -> None:
    assert (
        stored_name("base_model.model.model.layers.0.q_proj.base_layer.weight")
        == "model.layers.0.q_proj.weight"
    )
