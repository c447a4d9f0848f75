"""The formula that is printed is the estimate: its monomials sum to it, here and near here, and so do its slopes."""

from dataclasses import replace
from typing import Any

import pytest

from shardwise.estimate.memory.formula import estimate_memory
from shardwise.estimate.memory.monomials import WORDS, formula_of, written
from shardwise.estimate.memory.symbols import Size, evaluate, scaled, symbol
from shardwise.estimate.stack import Stack
from shardwise.facts.catalogue import named_shape


def shape(name: str) -> Any:
    found = named_shape(name)
    assert found is not None
    return found


NODE = {"world_size": 8, "gpus_per_node": 8}
STACKS = {
    "lora": ("Llama-3.1-8B", Stack(method="lora", micro_batch_size=2)),
    "lora-attention": ("Qwen2.5-7B", Stack(method="lora", lora_targets="attention", lora_rank=64)),
    "qlora": ("Llama-3.1-8B", Stack(method="qlora", activation_checkpointing="full", micro_batch_size=3)),
    "full-logits": ("Llama-3.2-1B", Stack(method="full", loss="full", micro_batch_size=8)),
    "gemma": ("gemma-2-2b", Stack(method="full", sequence_length=1024)),
    "selective": ("Mistral-7B-v0.3", Stack(method="lora", activation_checkpointing="selective")),
    "ddp": ("Llama-3.1-8B", Stack(method="full", sharding="ddp", gradient_accumulation_steps=2, **NODE)),
    "fsdp2": ("Llama-3.1-8B", Stack(method="full", sharding="fsdp2", micro_batch_size=4, **NODE)),
    "fsdp2-lora": ("Llama-3.1-8B", Stack(method="lora", sharding="fsdp2", micro_batch_size=4, **NODE)),
    "offload": (
        "Llama-3.1-8B",
        Stack(method="full", sharding="fsdp2", offload_optimizer="cpu", offload_parameters="cpu", **NODE),
    ),
    "zero1": ("Llama-3.2-1B", Stack(method="full", sharding="zero1", **NODE)),
    "zero2": ("Llama-3.1-8B", Stack(method="full", sharding="zero2", micro_batch_size=2, **NODE)),
    "zero3": ("Llama-3.1-8B", Stack(method="full", sharding="zero3", **NODE)),
    "mixture": ("Mixtral-8x7B-v0.1", Stack(method="lora")),
    "step": ("Llama-3.1-8B", Stack(method="full", sequence_length=256, activation_checkpointing="full")),
}


@pytest.mark.parametrize("name", STACKS)
def test_the_monomials_sum_to_the_estimate_term_by_term(name: str) -> None:
    model, stack = STACKS[name]
    formula, estimate = formula_of(shape(model), stack), estimate_memory(shape(model), stack)
    assert formula.phase == estimate.peak_phase
    assert formula.bytes_at() == pytest.approx(estimate.allocated_bytes, rel=1e-6)
    for term in estimate.terms:
        found = evaluate(formula.terms[term.name], formula.values)
        assert found == pytest.approx(term.bytes, rel=1e-6, abs=64), term.name
    assert set(formula.values) <= set(WORDS)


# What one more of something costs, at steps that leave the peak at its moment. Padding of shards is left aside: one
# more rank of an adapter is a row more on one of the ranks, one more rank of the run divides rows otherwise.
MOVES = ("step", "qlora", "offload")
STEPS = [
    *((n, "b", {"micro_batch_size": 1}) for n in STACKS if n not in (*MOVES, "fsdp2-lora", "lora-attention")),
    *((n, "S", {"sequence_length": 64}) for n in STACKS if n not in MOVES),
    *((n, "r", {"lora_rank": 1}) for n in ("lora", "lora-attention", "qlora", "mixture")),
    *((n, "n", {"world_size": 1}) for n in ("zero1", "zero2", "zero3", "fsdp2", "fsdp2-lora", "offload")),
]


@pytest.mark.parametrize("name, letter, steps", STEPS, ids=[f"{n}-{letter}" for n, letter, _ in STEPS])
def test_one_more_costs_what_the_formula_says(name: str, letter: str, steps: dict[str, int]) -> None:
    model, stack = STACKS[name]
    ((key, step),) = steps.items()
    further = replace(stack, **{key: getattr(stack, key) + step})
    here, there = (estimate_memory(shape(model), s).allocated_bytes for s in (stack, further))
    change = formula_of(shape(model), stack).change(letter, step)
    assert change == pytest.approx(there - here, rel=0.02, abs=0.0005 * here)


def test_sensitivities_are_those_of_their_symbols() -> None:
    model, stack = STACKS["fsdp2-lora"]
    formula = formula_of(shape(model), stack)
    longer = replace(stack, sequence_length=stack.sequence_length + 1000)
    more = estimate_memory(shape(model), longer).allocated_bytes - formula.bytes_at()
    assert formula.sensitivities["thousand_tokens"] == pytest.approx(more, rel=0.01)
    assert formula.sensitivities["world_size"] < 0 < formula.sensitivities["lora_rank"]


def test_a_size_is_a_number_that_keeps_its_formula() -> None:
    tokens, hidden = symbol("S", 2048), symbol("H", 4096)
    size = tokens * hidden * 2 + 7 - tokens
    assert size == 2048 * 4096 * 2 + 7 - 2048
    assert evaluate(size.sum, {"S": 10, "H": 3}) == 10 * 3 * 2 + 7 - 10
    assert (size > tokens) and list(range(symbol("L", 3))) == [0, 1, 2]
    assert isinstance(tokens // 2, Size) and tokens // 3 == 682 and not isinstance(tokens // 3, Size)
    assert evaluate((tokens * hidden // tokens).sum, {"H": 5}) == 5
    assert scaled(10, tokens).value == 10 and scaled(0, tokens).sum == {}
    assert written((("H", 1), ("S", 2), ("n", -1))) == "S^2 H / n"
