"""Every byte at the peak has a place in the model or a term of its own."""

import pytest

from shardwise.estimate.memory.formula import estimate_memory
from shardwise.estimate.memory.parts import parts_of
from shardwise.estimate.stack import Stack
from shardwise.facts.catalogue import named_shape
from shardwise.report.sources import _DEEPSPEED, _ENGINES, _KINDS, _TERMS, line_of, source_of

NODE = {"world_size": 8, "gpus_per_node": 8}


@pytest.mark.parametrize(
    "stack",
    [
        Stack(method="lora", micro_batch_size=2),
        Stack(method="qlora", activation_checkpointing="full"),
        Stack(method="full", sharding="fsdp2", activation_checkpointing="full", **NODE),
        Stack(method="full", sharding="zero2", **NODE),
        Stack(method="full", sharding="zero3", **NODE),
        Stack(method="lora", sharding="ddp", loss="full", **NODE),
    ],
    ids=lambda s: f"{s.method}-{s.sharding}",
)
def test_parts_sum_to_the_estimate_term_by_term(stack: Stack) -> None:
    llama = named_shape("Llama-3.1-8B")
    assert llama is not None
    estimate, parts = estimate_memory(llama, stack), parts_of(llama, stack)
    for term in estimate.terms:
        assert sum(p.bytes for p in parts if p.term == term.name) == pytest.approx(term.bytes, rel=1e-9)
    assert sum(p.bytes for p in parts) == pytest.approx(estimate.allocated_bytes, rel=1e-9)
    assert all(source_of(part, stack) for part in parts)


def test_modules_are_named_as_the_model_names_them() -> None:
    llama = named_shape("Llama-3.1-8B")
    assert llama is not None
    largest = parts_of(llama, Stack(method="lora", micro_batch_size=4))[:6]
    assert {"model.layers.*.mlp.gate_proj", "model.layers.*.mlp.up_proj"} <= {p.module for p in largest}


def test_every_line_that_is_named_is_there() -> None:
    for file, text in (*_KINDS.values(), *_TERMS.values(), *_ENGINES.values(), _DEEPSPEED):
        assert line_of(file, text).startswith(f"shardwise/training/{file}:")
    assert line_of("loss.py", "def full_cross_entropy") and line_of(
        "kernels/linear.py", "class _AdaptedLinear"
    )
    with pytest.raises(LookupError):
        line_of("loss.py", "def nothing_of_this_name")
