"""`engine: auto` takes the planner's choice among all legal engines and says why."""

from dataclasses import replace
from typing import Any

import pytest

from shardwise.facts.catalogue import catalogue_shape
from shardwise.facts.gpus import parse_offer
from shardwise.plan.model import DataFacts, Plan
from shardwise.plan.resolve import resolve
from shardwise.plan.search import Question, answer
from shardwise.recipe import Recipe, dump_recipe, parse_recipe
from shardwise.rules import Situation, check

SMALL, LARGE = "meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-70B"
PACKAGES = dict.fromkeys(("torch", "transformers", "peft", "bitsandbytes", "deepspeed"), "99.0")


def plan(
    yaml: str,
    offer: str,
    name: str = SMALL,
    packages: dict[str, str] | None = None,
    host_gib: int | None = None,
    length: int = 1024,
) -> tuple[Recipe, Plan]:
    where = parse_offer(offer)
    if host_gib is not None:
        where = replace(where, gpu=replace(where.gpu, host_bytes_per_gpu=host_gib * 2**30))
    shape = catalogue_shape(name)
    assert shape is not None
    recipe = parse_recipe(f"model: x\ndata: {{train: y.jsonl, sequence_length: {length}}}\n{yaml}")
    data = DataFacts(tokens=2_000_000, rows=4_000, longest_tokens=900)
    gpus = where.count
    return resolve(recipe, shape, where, data, Situation("cuda", gpus, "9.0", packages or PACKAGES))


def why(found: Plan, key: str) -> str:
    return next(c.why for c in found.choices if c.key == key)


def test_offload_is_taken_where_nothing_simpler_fits_and_written_out() -> None:
    recipe, found = plan("method: full\n", "1xH100-80GB")
    assert found.verdict == "fits"
    section = recipe.engine.deepspeed
    assert recipe.engine.name == "deepspeed" and section.offload_optimizer == "cpu"
    assert (f"zero{section.zero_stage}", section.offload_optimizer, section.offload_parameters) == (
        found.stack.sharding, found.stack.offload_optimizer, found.stack.offload_parameters,
    )  # fmt: skip
    assert "single needs at least" in why(found, "engine.name") and "79.65 GiB" in why(found, "engine.name")
    assert {"engine.deepspeed.zero_stage", "engine.deepspeed.offload_optimizer"} <= {
        c.key for c in found.choices
    }
    assert parse_recipe(dump_recipe(recipe)) == recipe


def test_fsdp2_offloads_where_shards_do_not_fit() -> None:
    recipe, found = plan("method: full\n", "8xH100-80GB", LARGE)
    assert found.stack.sharding == "fsdp2" and found.stack.offload_parameters == "cpu"
    assert recipe.engine.fsdp2.cpu_offload and why(found, "engine.fsdp2.cpu_offload")
    assert "fsdp2 needs at least" in why(found, "engine.name")


@pytest.mark.parametrize("offer", ["1xH100-80GB", "1xRTX4090", "4xRTX4090"])
def test_nothing_is_offloaded_that_fits_without(offer: str) -> None:
    _, found = plan("method: lora\n", offer)
    assert (found.stack.offload_optimizer, found.stack.offload_parameters) == ("none", "none")


@pytest.mark.parametrize(
    ("method", "offer", "name"),
    [
        ("full", "1xH100-80GB", SMALL),
        ("full", "8xH100-80GB", SMALL),
        ("full", "2xH200", SMALL),
        ("lora", "8xH100-80GB", LARGE),
        ("lora", "8xH100-80GB", SMALL),
        ("qlora", "2xRTX4090", LARGE),
        ("full", "8xH100-80GB", LARGE),
    ],
)
def test_it_is_what_the_planner_recommends(method: str, offer: str, name: str) -> None:
    """The same batch asked of `shardwise plan`: its best option runs on the same engine."""
    from shardwise.facts.gpus import load_prices

    batch = "training: {global_batch_size: 32, activation_checkpointing: full, micro_batch_size: 1}\n"
    _, found = plan(f"method: {method}\n{batch}", offer, name, length=2048)
    shape = catalogue_shape(name)
    assert shape is not None
    question = Question(
        shape, load_prices(), methods=(method,), offers=(parse_offer(offer),), global_batch_size=32,
        activation_checkpointing="full", micro_batch_size=1,
    )  # fmt: skip
    best = answer(question).options[0].plan.stack
    mine = found.stack
    assert (mine.sharding, mine.offload_optimizer, mine.offload_parameters) == (
        best.sharding, best.offload_optimizer, best.offload_parameters,
    )  # fmt: skip


def test_what_is_not_installed_is_not_chosen_and_that_is_said() -> None:
    without = {k: v for k, v in PACKAGES.items() if k != "deepspeed"}
    recipe, found = plan("method: full\n", "1xH100-80GB", packages=without)
    assert recipe.engine.name == "single" and found.verdict == "does not fit"
    assert any("shardwise[deepspeed]" in note for note in found.notes)


def test_what_is_not_legal_is_not_chosen() -> None:
    recipe, _ = plan("method: qlora\n", "2xRTX4090", LARGE)
    assert recipe.engine.name == "fsdp2" and recipe.engine.fsdp2.cpu_offload
    factored, _ = plan("method: full\noptimizer: {name: adafactor}\n", "1xH100-80GB")
    assert factored.engine.deepspeed.offload_optimizer == "none"
    for one in (recipe, factored):
        check(one, catalogue_shape(LARGE), Situation("cuda", 2, "9.0", PACKAGES))


def test_what_a_person_wrote_in_an_engine_s_section_holds() -> None:
    recipe, _ = plan("method: full\nengine: {deepspeed: {offload_optimizer: none}}\n", "1xH100-80GB")
    assert recipe.engine.deepspeed.offload_optimizer == "none"
    kept, found = plan("method: full\nengine: {fsdp2: {cpu_offload: false}}\n", "8xH100-80GB", LARGE)
    assert found.stack.sharding != "fsdp2" or not kept.engine.fsdp2.cpu_offload


def test_nvme_is_taken_with_a_folder_and_proposed_without() -> None:
    yaml = "method: full\n"
    _, without = plan(yaml, "1xH100-80GB", host_gib=64)
    assert without.verdict == "does not fit"
    assert any("engine.deepspeed.nvme_path" in note for note in without.notes)
    recipe, found = plan(yaml + "engine: {deepspeed: {nvme_path: /disk}}\n", "1xH100-80GB", host_gib=64)
    assert found.verdict == "fits" and recipe.engine.deepspeed.offload_parameters == "nvme"


def test_a_processor_has_nowhere_to_offload_to() -> None:
    from shardwise.facts.machine import as_offer

    shape = catalogue_shape(LARGE)
    assert shape is not None
    recipe = parse_recipe("model: x\ndata: y.jsonl\nmethod: full\nengine: {processes: 2}\n")
    options: dict[str, Any] = {"data": DataFacts(tokens=2_000_000, rows=4_000, longest_tokens=900)}
    _, found = resolve(recipe, shape, as_offer("cpu"), **options)
    assert found.verdict == "does not fit" and found.stack.offload_optimizer == "none"
