"""Decay groups, Muon's share, clipping over shards, rules on shards, 8-bit states in checkpoints."""

import json
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, PretrainedConfig, Qwen3Config

from shardwise.launch import start
from shardwise.recipe.schema import Optimizer
from shardwise.training import eight_bit
from shardwise.training.matrix_rules import Muon
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


def test_muon_in_bf16_is_torch_s() -> None:
    torch.manual_seed(0)
    ours = [torch.nn.Parameter(torch.randn(shape)) for shape in ((48, 32), (32, 48), (32, 32))]
    theirs = [torch.nn.Parameter(p.detach().clone()) for p in ours]
    mine = Muon([(str(i), p) for i, p in enumerate(ours)], 1e-2, 0.1, 0.9, torch.bfloat16)
    torchs = torch.optim.Muon(
        theirs, lr=1e-2, weight_decay=0.1, momentum=0.9, nesterov=True, adjust_lr_fn="match_rms_adamw"
    )
    for _ in range(5):
        for p, q in zip(ours, theirs, strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
        mine.step()
        torchs.step()
    for p, q in zip(ours, theirs, strict=True):
        assert float((p - q).detach().norm() / q.norm()) < 1e-4  # scaled before or after one rounding to bf16


@pytest.fixture(scope="module")
def on_shards(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, float]]]:
    """What each of three ranks measured."""
    out = tmp_path_factory.mktemp("shards")
    command = [sys.executable, str(Path(__file__).with_name("shard_ranks.py")), str(out)]
    outcome = start(command, 3, out / "logs", {"OMP_NUM_THREADS": "1"})
    assert outcome.failure is None, outcome.failure.tail
    return [json.loads((out / f"{rank}.json").read_text()) for rank in range(3)]


@pytest.mark.parametrize("name", ["adamw", "sgd", "adafactor", "muon"])
def test_a_rule_on_shards_is_the_rule_on_whole_tensors(
    name: str, on_shards: list[dict[str, dict[str, float]]]
) -> None:
    """Three ranks, rows that do not divide, empty shards; torch's Adafactor is the reference of ours."""
    for rank in on_shards:
        assert rank[name]["weights"] < 1e-5 and rank[name]["norm"] < 1e-6


def eight_bit_state(sizes: tuple[int, ...]) -> tuple[torch.nn.Parameter, torch.optim.Optimizer]:
    pytest.importorskip("bitsandbytes")
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(sizes))
    optimizer = build_optimizer(Optimizer(name="adamw_8bit"), [("w.weight", weight)], 1e-2)
    for _ in range(3):
        weight.grad = torch.randn(sizes) - 0.5
        optimizer.step()
    return weight, optimizer


def test_8_bit_states_survive_a_checkpoint_to_the_bit() -> None:
    """Also blocks whose largest number is negative, a last block that is short, and blocks of zeros."""
    weight, optimizer = eight_bit_state((50, 130))
    state = optimizer.state[weight]
    state["state1"].view(-1)[512:768], state["absmax1"][2] = 127, 0.0
    saved = eight_bit.numbers(state)
    assert set(saved) == {"step", "exp_avg", "exp_avg_sq"} and saved["exp_avg"].shape == weight.shape
    _, other = eight_bit_state((50, 130))
    kept = next(iter(other.state.values()))
    for key in ("state1", "state2"):
        kept[key].fill_(7)
    eight_bit.take_numbers(kept, saved)
    assert kept["step"] == 3
    again = eight_bit.numbers(kept)
    for key in ("exp_avg", "exp_avg_sq"):
        torch.testing.assert_close(again[key], saved[key], rtol=1e-6, atol=0.0)


def test_small_tensors_keep_fp32_states_whatever_their_shards() -> None:
    pytest.importorskip("bitsandbytes")
    named = [
        ("a.weight", torch.nn.Parameter(torch.randn(64, 64))),
        ("b.weight", torch.nn.Parameter(torch.randn(63, 64))),
    ]
    updater = Updater(named, Optimizer(name="adamw_8bit"), 1e-2, accumulate=False)
    states = updater.optimizer_state()
    for name in ("a.weight", "b.weight"):
        assert set(states[name]) == {"step", "exp_avg", "exp_avg_sq"}
    assert [type(o).__name__ for o in updater.optimizers] == ["AdamW", "AdamW8bit"]


def test_states_made_for_a_checkpoint_are_not_a_step() -> None:
    weight = torch.nn.Parameter(torch.ones(4, 4))
    updater = Updater([("w.weight", weight)], Optimizer(), 1e-2, accumulate=False)
    assert float(updater.optimizer_state()["w.weight"]["step"]) == 0.0
