"""Which layers get an adapter: those that the plan counts, on every kind of model."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, DeepseekV2Config, Qwen2MoeConfig

from shardwise.errors import RecipeError
from shardwise.facts.model import read_model
from shardwise.recipe.schema import Lora
from shardwise.training.adapters.lora import adapt

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "moe_intermediate_size": 16,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "num_experts_per_tok": 2,
}  # fmt: skip
MIXTURES = {
    "shared experts": Qwen2MoeConfig(**SIZES, num_experts=4, shared_expert_intermediate_size=48),
    "shared experts and a dense layer": DeepseekV2Config(
        **SIZES,
        n_routed_experts=4,
        n_shared_experts=1,
        first_k_dense_replace=1,
        kv_lora_rank=8,
        q_lora_rank=None,
        qk_nope_head_dim=8,
        qk_rope_head_dim=8,
        v_head_dim=8,
        n_group=1,
        topk_group=1,
    ),
}


@pytest.mark.parametrize("kind", MIXTURES)
def test_a_mixture_s_experts_get_no_adapter_and_the_plan_counts_what_is_trained(
    kind: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(MIXTURES[kind])
    model.config.save_pretrained(tmp_path)
    adapted = adapt(model, Lora(rank=4), seed=0)
    names = [n for n, p in adapted.named_parameters() if p.requires_grad]
    assert names and not any(
        ".experts" in n or "_proj" in n.split(".mlp.")[-1] for n in names if ".mlp." in n
    )
    trained = sum(p.numel() for p in adapted.parameters() if p.requires_grad)
    assert trained == read_model(str(tmp_path)).lora_parameters(4, "all-linear")


def test_names_that_peft_takes_for_experts_are_refused() -> None:
    model = AutoModelForCausalLM.from_config(MIXTURES["shared experts"])
    with pytest.raises(RecipeError, match="down_proj of a mixture"):
        adapt(model, Lora(rank=4, targets=("q_proj", "down_proj")), seed=0)
