"""As few layers are recomputed as fit, and not one less."""

import pytest

from shardwise.estimate.memory.formula import estimate_memory
from shardwise.facts.catalogue import catalogue_shape
from shardwise.facts.gpus import Offer, load_prices, parse_offer
from shardwise.plan.model import verdict
from shardwise.plan.question import Question, checkpointing_of
from shardwise.plan.recomputation import least_layers
from shardwise.plan.resolve import resolve
from shardwise.plan.search import answer
from shardwise.plan.write import recipe_of
from shardwise.recipe.load import dump_recipe, parse_recipe
from shardwise.rules import check
from shardwise.rules.problem import Situation


def test_the_least_is_found_on_convex_lines_of_all_kinds() -> None:
    for layers in (2, 5, 33):
        for steep, flat, floor in ((100, 0, 0), (100, 7, 500), (3, 1, 90), (0, 0, 0), (50, 50, 10**6)):

            def needs(k: int, steep: int = steep, flat: int = flat, floor: int = floor) -> int:
                return max(10_000 - steep * k, 9_000 - flat * k, floor)

            for limit in range(8_000, 10_000, 37):
                wanted = next((k for k in range(1, layers) if needs(k) <= limit), None)
                if needs(0) > limit:
                    assert least_layers(layers, needs, limit) == wanted, (layers, steep, flat, floor, limit)


def test_it_asks_a_few_times_only() -> None:
    asked: list[int] = []

    def needs(k: int) -> int:
        asked.append(k)
        return 80_000 - 1_000 * k

    assert least_layers(80, needs, 41_500) == 39
    assert len(set(asked)) <= 4


@pytest.mark.parametrize(
    ("name", "method", "gpus"),
    [
        ("meta-llama/Llama-3.1-8B", "lora", "1xRTX4090"),
        ("Qwen/Qwen2.5-7B", "full", "4xA100-80GB"),
        ("meta-llama/Llama-3.1-8B", "qlora", "1xT4"),
        ("meta-llama/Llama-3.1-70B", "full", "16xH100-80GB"),
    ],
)
def test_one_layer_less_does_not_fit(name: str, method: str, gpus: str) -> None:
    from dataclasses import replace

    shape = catalogue_shape(name)
    assert shape is not None
    offer = parse_offer(gpus)
    found = answer(Question(shape, load_prices(), methods=(method,), offers=(offer,), sequence_length=4096))
    some = [o.plan for o in found.options if isinstance(o.plan.stack.activation_checkpointing, int)]
    assert some, [o.plan.stack for o in found.options]
    for plan in some:
        count = plan.stack.activation_checkpointing
        assert isinstance(count, int) and 1 <= count < shape.num_hidden_layers
        assert plan.verdict == "fits"
        less = replace(plan.stack, activation_checkpointing=count - 1 or "none")
        assert verdict(estimate_memory(shape, less), plan.capacity_bytes) != "fits"
        option = next(o for o in found.options if o.plan is plan)
        written = parse_recipe(dump_recipe(recipe_of(option, name, "rows.jsonl", 1.0)))
        assert written.training.activation_checkpointing == count
        check(written, shape, Situation())


def test_a_recipe_that_leaves_it_open_gets_the_least() -> None:
    from dataclasses import replace

    shape, offer = catalogue_shape("meta-llama/Llama-3.1-8B"), parse_offer("1xRTX4090")
    assert shape is not None
    recipe, plan = resolve(parse_recipe("model: x\ndata: {train: y, sequence_length: 2048}\n"), shape, offer)
    count = plan.stack.activation_checkpointing
    assert isinstance(count, int) and plan.verdict == "fits"
    assert recipe.training.activation_checkpointing == count
    less = replace(plan.stack, activation_checkpointing=count - 1 or "none")
    assert verdict(estimate_memory(shape, less), plan.capacity_bytes) != "fits"
    why = {c.key: c.why for c in plan.choices}
    assert "fewest layers" in why["training.activation_checkpointing"]


def test_more_layers_than_there_are_is_refused() -> None:
    from shardwise.errors import RuleError, UnknownNameError

    shape = catalogue_shape("HuggingFaceTB/SmolLM2-135M")
    assert shape is not None
    assert checkpointing_of("30", shape) == 30 and checkpointing_of("full", shape) == "full"
    with pytest.raises(RuleError, match="30"):
        checkpointing_of("31", shape)
    with pytest.raises(UnknownNameError):
        checkpointing_of("0", shape)
    recipe = parse_recipe("model: x\ndata: y\ntraining: {activation_checkpointing: 31}\n")
    with pytest.raises(RuleError, match="31 on a model of 30 layers"):
        check(recipe, shape, Situation())


def test_more_recomputed_layers_take_less_memory_and_more_time() -> None:
    from shardwise.estimate.speed import step_seconds
    from shardwise.estimate.stack import Stack

    shape, offer = catalogue_shape("Qwen/Qwen2.5-7B"), parse_offer("8xA100-80GB")
    assert shape is not None and isinstance(offer, Offer)
    for sharding in ("ddp", "fsdp2", "zero2", "zero3"):
        stacks = [
            Stack(sharding=sharding, world_size=8, gpus_per_node=8, activation_checkpointing=kind)
            for kind in ("none", 7, 14, 27)
        ]
        sizes = [estimate_memory(shape, s).allocated_bytes for s in stacks]
        times = [step_seconds(shape, offer.gpu, s) for s in stacks]
        assert sizes == sorted(sizes, reverse=True) and len(set(sizes)) == 4, sharding
        assert times == sorted(times) and len(set(times)) == 4, sharding
