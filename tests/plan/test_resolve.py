"""Every auto of a recipe gets a value and a reason; what a person wrote is kept."""

from typing import Any

import pytest

from shardwise.errors import RecipeError, RuleError
from shardwise.facts.catalogue import catalogue_shape
from shardwise.facts.gpus import Offer, parse_offer
from shardwise.facts.machine import as_offer, detect_machine
from shardwise.facts.model import ModelShape
from shardwise.plan.model import DataFacts, Plan, planned_steps
from shardwise.plan.resolve import resolve
from shardwise.recipe.load import dump_recipe, parse_recipe
from shardwise.recipe.schema import Recipe

DATA = DataFacts(tokens=2_000_000, rows=4_000, longest_tokens=900)


def shape(name: str = "meta-llama/Llama-3.1-8B") -> ModelShape:
    found = catalogue_shape(name)
    assert found is not None
    return found


def plan(
    yaml: str = "", offer: str | Offer = "8xH100-80GB", data: DataFacts | None = DATA, name: str = ""
) -> tuple[Recipe, Plan]:
    recipe = parse_recipe("model: x\ndata: y.jsonl\n" + yaml)
    where = parse_offer(offer) if isinstance(offer, str) else offer
    return resolve(recipe, shape(name) if name else shape(), where, data)


def autos(tree: Any, path: str = "") -> list[str]:
    if isinstance(tree, dict):
        return [p for key, value in tree.items() for p in autos(value, f"{path}.{key}")]
    return [path] if tree == "auto" else []


def test_no_auto_is_left_and_the_copy_loads_back() -> None:
    recipe, found = plan()
    left = autos(recipe.model_dump(mode="json"))
    # how rows are read is found out from the rows, where ranks run from the launcher
    assert [p for p in left if not p.startswith((".data.train", ".launch"))] == []
    assert parse_recipe(dump_recipe(recipe)) == recipe
    assert found.verdict == "fits"


def test_every_choice_says_why() -> None:
    _, found = plan()
    assert {"engine.name", "training.micro_batch_size", "data.sequence_length"} <= {
        c.key for c in found.choices
    }
    assert all(c.why for c in found.choices)


def test_what_a_person_wrote_is_kept() -> None:
    recipe, found = plan(
        "training: {micro_batch_size: 3, global_batch_size: 48, activation_checkpointing: full}\n"
        "optimizer: {learning_rate: 3e-4}\nengine: fsdp2\n"
    )
    assert (found.stack.micro_batch_size, found.stack.global_batch_size) == (3, 48)
    assert found.stack.sharding == "fsdp2"
    assert recipe.optimizer.learning_rate == 3e-4
    assert "training.micro_batch_size" not in {c.key for c in found.choices}


def test_a_batch_that_cannot_be_split_names_the_nearest_that_can() -> None:
    with pytest.raises(RecipeError) as caught:
        plan("training: {global_batch_size: 100, micro_batch_size: 3}\n")
    assert "96 or 120" in caught.value.hint


@pytest.mark.parametrize(("method", "rate"), [("lora", 2e-4), ("qlora", 2e-4), ("full", 1e-5)])
def test_the_learning_rate_follows_the_method(method: str, rate: float) -> None:
    recipe, _ = plan(f"method: {method}\n")
    assert recipe.optimizer.learning_rate == rate


def test_the_length_holds_the_longest_row_within_the_model_s_limit() -> None:
    assert plan()[1].stack.sequence_length == 1024
    long = DataFacts(tokens=10**7, rows=100, longest_tokens=10**6)
    assert plan(data=long, name="HuggingFaceTB/SmolLM2-135M")[1].stack.sequence_length == 8192


def test_one_gpu_is_single_and_many_copy_or_shard_by_size() -> None:
    assert plan(offer="1xH100-80GB")[1].stack.sharding == "single"
    assert plan(offer="8xH100-80GB")[1].stack.sharding == "ddp"
    assert plan(offer="8xH100-80GB", name="meta-llama/Llama-3.1-70B")[1].stack.sharding == "fsdp2"


def test_deepspeed_is_taken_when_asked_for_with_its_stage() -> None:
    recipe, found = plan("engine: {name: deepspeed, deepspeed: {zero_stage: 3, offload_optimizer: cpu}}\n")
    assert (found.stack.sharding, found.stack.offload_optimizer) == ("zero3", "cpu")
    assert isinstance(recipe.engine.deepspeed.reduce_bucket_size, int)


def test_a_device_that_is_not_there_is_refused() -> None:
    with pytest.raises(RuleError, match="cuda"):
        plan("engine: {device: cuda}\n", offer=as_offer("cpu"))
    with pytest.raises(RuleError, match="16"):
        plan("engine: {processes: 16}\n")


def test_a_processor_is_one_rank_and_takes_bf16_only_with_matrix_instructions() -> None:
    _, found = plan(offer=as_offer("cpu"), name="HuggingFaceTB/SmolLM2-135M")
    assert (found.stack.device, found.stack.world_size) == ("cpu", 1)
    assert (found.stack.precision == "bf16") == detect_machine().has_fast_bf16


def test_a_card_without_bf16_gets_fp32() -> None:
    _, found = plan(offer="1xT4", name="HuggingFaceTB/SmolLM2-135M")
    assert found.stack.precision == "fp32"


def test_what_does_not_fit_is_planned_anyway_and_says_so() -> None:
    _, found = plan("method: full\n", offer="1xRTX4090")
    assert found.verdict == "does not fit"
    assert found.head_room < 0


def test_d20_small_data_gives_at_least_one_step() -> None:
    assert planned_steps(sequences=5, global_batch_size=16, epochs=1.0, max_steps=None) == 1
    _, found = plan(data=DataFacts(tokens=900, rows=8, longest_tokens=200), offer="1xH100-80GB")
    assert found.steps is not None
    assert found.steps >= 1


def test_d25_steps_come_from_the_data_and_reach_the_end() -> None:
    assert planned_steps(sequences=20, global_batch_size=4, epochs=2.0, max_steps=None) == 10
    assert planned_steps(sequences=20, global_batch_size=4, epochs=2.0, max_steps=7) == 7
    assert (
        planned_steps(sequences=21, global_batch_size=4, epochs=1.0, max_steps=None) == 6
    )  # the last is smaller
    assert planned_steps(None, 4, 1.0, None) is None


def test_counted_sequences_win_over_tokens() -> None:
    exact = DataFacts(tokens=10**6, rows=50, longest_tokens=500, sequences_at=lambda length: 77)
    assert exact.sequences(512) == 77
    assert DataFacts(tokens=1000).sequences(512) == 2


def test_held_out_rows_are_five_percent_and_at_most_200() -> None:
    assert plan()[0].data.validation == 200
    assert plan(data=DataFacts(tokens=9000, rows=100, longest_tokens=100))[0].data.validation == 5
    assert plan(data=DataFacts(tokens=900, rows=10, longest_tokens=100))[0].data.validation == 0
