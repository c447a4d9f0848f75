"""The single engine: accumulation, clipping, masters and optimizer groups."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from shardwise.errors import RuleError
from shardwise.recipe import parse_recipe
from shardwise.recipe.schema import Optimizer
from shardwise.training.batches import MicroBatch, pack_documents
from shardwise.training.engines.protocol import trained
from shardwise.training.engines.single import SingleEngine
from shardwise.training.layers import decoder_layers
from shardwise.training.model import ModelFolder, prepare_for_training
from shardwise.training.optimizers import Updater, decay_groups

LENGTHS = (3, 40, 5, 60, 4, 30, 2, 50)


def engine(
    model: Path,
    precision: str = "fp32",
    accumulate: bool = False,
    method: str = "full",
    checkpointing: str | int = "none",
) -> SingleEngine:
    recipe = parse_recipe(
        f"model: {model}\ndata: none\nmethod: {method}\noptimizer: {{learning_rate: 1e-3}}\n"
        f"training: {{precision: {precision}, activation_checkpointing: {checkpointing}}}\n"
    )
    base = ModelFolder(model, recipe).load()
    if method == "lora":
        from shardwise.training.adapters.lora import adapt

        base = adapt(base, recipe.lora, 0)
    return SingleEngine(prepare_for_training(base, recipe), recipe, torch.device("cpu"), accumulate)


def documents() -> list[tuple[np.ndarray, np.ndarray]]:
    draw = np.random.default_rng(0)
    return [(ids, ids) for ids in (draw.integers(3, 300, n).astype(np.int32) for n in LENGTHS)]


def one_step(
    e: SingleEngine, batches: list[MicroBatch], max_grad_norm: float | None = 1.0
) -> tuple[float, float]:
    tokens = sum(b.trained_tokens for b in batches)
    total = 0.0
    for i, batch in enumerate(batches):
        loss = e.forward(batch)
        total += loss.item()
        e.backward(loss, 1 / tokens, last=i == len(batches) - 1)
    return total / tokens, e.step(1e-3, max_grad_norm)


def weights(e: SingleEngine) -> torch.Tensor:
    return torch.cat([w.flatten() for _, w in e.trained_weights()])


@pytest.mark.parametrize("method", ["full", "lora"])
@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-4), ("bf16", 2e-2)])
def test_l01_accumulation_equals_the_big_batch(
    tiny_model: Path, method: str, precision: str, tolerance: float
) -> None:
    whole, parts = engine(tiny_model, precision, method=method), engine(tiny_model, precision, True, method)
    rows = documents()
    loss, norm = one_step(whole, [pack_documents(rows)])
    loss_8, norm_8 = one_step(parts, [pack_documents([row]) for row in rows])
    assert loss_8 == pytest.approx(loss, rel=tolerance)
    assert norm_8 == pytest.approx(norm, rel=tolerance)
    if precision == "fp32":
        torch.testing.assert_close(weights(parts), weights(whole), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("method", ["full", "lora"])
def test_recomputing_some_layers_changes_no_bit(tiny_model: Path, method: str) -> None:
    """None, some or all layers recomputed: the same losses, norms and weights; and only so many are recomputed."""
    rows, found = documents(), []
    for kind in ("none", 1, "full"):
        e = engine(tiny_model, method=method, checkpointing=kind)
        layers = decoder_layers(e.module)
        assert len(layers) > 1
        on = [bool(layer.gradient_checkpointing) for layer in layers]
        count = {"none": 0, "full": len(layers)}.get(str(kind), kind)
        assert on == [i < int(count) for i in range(len(layers))]
        steps = [one_step(e, [pack_documents(rows)]) for _ in range(3)]
        found.append((steps, weights(e)))
    for steps, trained_weights in found[1:]:
        assert steps == found[0][0]
        assert torch.equal(trained_weights, found[0][1])


def test_a_model_of_fewer_layers_is_refused(tiny_model: Path) -> None:
    with pytest.raises(RuleError, match="layers"):
        engine(tiny_model, checkpointing=99)


def test_clipping_scales_the_gradient_by_the_global_norm(tiny_model: Path) -> None:
    """With plain SGD an update is rate x gradient, so its length is rate x max_grad_norm."""
    e = engine(tiny_model)
    named = trained(e.module)
    e.updater = Updater(named, Optimizer(name="sgd", momentum=0.0), 1.0, accumulate=False)
    before = torch.cat([p.detach().clone().flatten() for _, p in named])
    loss = e.forward(pack_documents(documents()))
    e.backward(loss, 1.0, last=True)
    norm = e.step(1.0, 0.5)
    after = torch.cat([p.detach().flatten() for _, p in named])
    assert norm > 0.5
    assert (after - before).norm().item() == pytest.approx(0.5, rel=1e-3)


def test_a_norm_that_is_not_finite_makes_no_update(tiny_model: Path) -> None:
    e = engine(tiny_model)
    before = weights(e).clone()
    loss = e.forward(pack_documents(documents()))
    e.backward(loss, float("nan"), last=True)
    assert not np.isfinite(e.step(1e-3, 1.0))
    assert torch.equal(weights(e), before)


def test_l08_bf16_weights_follow_fp32_masters(tiny_model: Path) -> None:
    """At a rate far below bf16's resolution masters move, and the weights are their rounding."""
    e = engine(tiny_model, "bf16")
    before = weights(e).clone()
    for _ in range(3):
        loss = e.forward(pack_documents(documents()))
        e.backward(loss, 1e-3, last=True)
        e.step(1e-6, 1.0)
    assert all(m.dtype == torch.float32 for m in e.updater.masters)
    moved = (weights(e) - before).abs()
    assert 0 < moved.max() < 1e-4
    for param, master in zip(e.updater.params, e.updater.masters, strict=True):
        assert torch.equal(param, master.bfloat16())


@pytest.mark.parametrize(
    "model",
    [
        lambda: LlamaForCausalLM(LlamaConfig(**SMALL)),
        lambda: Qwen3ForCausalLM(Qwen3Config(**SMALL, head_dim=8)),
        lambda: GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=1, n_head=4, vocab_size=64, n_positions=64)),
    ],
    ids=["llama", "qwen3", "gpt2"],
)
def test_l10_norms_and_biases_are_not_decayed(model) -> None:
    named = list(model().named_parameters())
    names = {id(p): n for n, p in named}
    groups = decay_groups(Optimizer(weight_decay=0.1), named)
    for group in groups:
        for p in group["params"]:
            name = names[id(p)]
            plain = "norm" in name or "ln_" in name or name.endswith("bias")
            assert (group["weight_decay"] == 0.0) == plain, name


SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def test_state_taken_and_given_back_continues_bitwise(tiny_model: Path) -> None:
    batches = [pack_documents([row]) for row in documents()]
    whole, first, second = (engine(tiny_model) for _ in range(3))
    for b in batches:
        one_step(whole, [b])
    for b in batches[:3]:
        one_step(first, [b])
    state = {k: {n: _clone(v) for n, v in part.items()} for k, part in first.state().items()}
    second.load_state(state)
    for b in batches[3:]:
        one_step(second, [b])
    assert torch.equal(weights(second), weights(whole))


def _clone(value):
    if isinstance(value, torch.Tensor):
        return value.clone()
    return {k: _clone(v) for k, v in value.items()}
