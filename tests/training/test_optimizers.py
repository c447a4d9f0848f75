"""Decay groups, Muon's share, clipping over shards."""

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, PretrainedConfig, Qwen3Config

from shardwise.recipe.schema import Optimizer
from shardwise.training.optimizers import Updater, build_optimizer, decay_groups, global_norm, orthogonalises

SIZES = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
MODELS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SIZES, **HEADS, attention_bias=True),  # type: ignore[arg-type]
    "gpt2": GPT2Config(vocab_size=50, n_embd=32, n_layer=1, n_head=4),
    "qwen3": Qwen3Config(**SIZES, **HEADS, head_dim=8),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("family", MODELS)
def test_l10_no_norm_and_no_bias_is_decayed(family: str) -> None:
    """q_norm and ln_1 included; embeddings are decayed, as stated."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(MODELS[family])
    named = list(model.named_parameters())
    decayed, spared = decay_groups(Optimizer(weight_decay=0.1), named)
    assert decayed["weight_decay"] == 0.1 and spared["weight_decay"] == 0.0
    ids = {id(p) for p in decayed["params"]}
    for name, param in named:
        is_norm_or_bias = "norm" in name or ".ln_" in name or name.endswith("bias")
        assert (id(param) in ids) is not is_norm_or_bias, name
    assert len(decayed["params"]) + len(spared["params"]) == len(named)


def test_muon_takes_matrices_between_hidden_states_only() -> None:
    assert orthogonalises("model.layers.0.mlp.up_proj.weight", (48, 32))
    for name, shape in (
        ("model.embed_tokens.weight", (50, 32)),
        ("lm_head.weight", (50, 32)),
        ("transformer.wte.weight", (50, 32)),
        ("model.norm.weight", (32,)),
    ):
        assert not orthogonalises(name, shape)


def test_muon_shares_its_run_with_adamw() -> None:
    torch.manual_seed(0)
    named = [
        ("model.embed_tokens.weight", torch.nn.Parameter(torch.randn(10, 8))),
        ("model.layers.0.up_proj.weight", torch.nn.Parameter(torch.randn(8, 8))),
        ("model.norm.weight", torch.nn.Parameter(torch.ones(8))),
    ]
    updater = Updater(named, Optimizer(name="muon"), 1e-2, accumulate=False)
    assert sorted(type(o).__name__ for o in updater.optimizers) == ["AdamW", "Muon"]
    before = [p.detach().clone() for _, p in named]
    for _, p in named:
        p.grad = torch.randn_like(p)
    updater.step(1e-2, None)
    assert all(not torch.equal(a, p) for a, (_, p) in zip(before, named, strict=True))


@pytest.mark.parametrize("name", ["adamw", "sgd", "adafactor", "adamw_8bit"])
def test_every_rule_lowers_a_simple_loss(name: str) -> None:
    if name.endswith("8bit"):
        pytest.importorskip("bitsandbytes")
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(64, 64))
    optimizer = build_optimizer(Optimizer(name=name), [("w.weight", weight)], 1e-2)  # type: ignore[arg-type]
    first = float(weight.detach().square().sum())
    for _ in range(10):
        weight.grad = 2 * weight.detach()
        optimizer.step()
    assert float(weight.detach().square().sum()) < first


def test_l18_the_norm_is_that_of_all_shards() -> None:
    whole = torch.arange(12.0)
    other = float(whole[6:].square().sum())
    norm = global_norm([whole[:6]], over_ranks=lambda total: total + other)
    assert norm == pytest.approx(float(whole.norm()))


def test_a_norm_that_is_not_finite_updates_nothing() -> None:
    weight = torch.nn.Parameter(torch.ones(4, 4))
    updater = Updater([("w.weight", weight)], Optimizer(), 1e-2, accumulate=False)
    weight.grad = torch.full((4, 4), float("nan"))
    assert not updater.step(1e-2, 1.0) < float("inf")
    assert torch.equal(weight, torch.ones(4, 4)) and weight.grad is None
