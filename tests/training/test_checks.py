"""The first two steps say what usually goes wrong in silence."""

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.errors import RunError
from shardwise.recipe.schema import Quantization
from shardwise.training import checks
from shardwise.training.build import build_engine
from shardwise.training.engines.protocol import Ranks
from shardwise.training.model import ModelFolder

sys.path.insert(0, str(Path(__file__).parent / "engines"))
import toy


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy.make_model(tmp_path_factory.mktemp("toy"))


def engine(folder: Path, **sections: Any) -> Any:
    recipe = toy.recipe(**{"engine": {"name": "single", "device": "cpu", "processes": 1}, **sections})
    return build_engine(recipe, ModelFolder(folder, recipe), torch.device("cpu"), Ranks(), 4), recipe


def steps(live: Any, first: checks.FirstSteps, count: int = 2) -> list[str]:
    told = []
    for step in range(count):
        batches = toy.micro_batches(step, 1, 0)
        for i, batch in enumerate(batches):
            live.backward(live.forward(batch), 1e-3, last=i == len(batches) - 1)
        first.before_update(batches)
        live.step(1e-3, 1.0)
        told += first.after_update(1.0)
    return told


def test_a_loss_of_a_die_over_the_vocabulary_is_told() -> None:
    assert checks.starting_loss(math.log(50_000), 50_000) is not None
    assert checks.starting_loss(3.0, 50_000) is None


@pytest.mark.parametrize("method", ["full", "lora"])
def test_a_sound_run_is_silent(folder: Path, method: str) -> None:
    live, recipe = engine(folder, method=method, lora={"rank": 4, "alpha": 8.0})
    assert steps(live, checks.FirstSteps(live, recipe)) == []


def test_a_tensor_that_the_loss_does_not_reach_is_named(folder: Path) -> None:
    live, recipe = engine(folder)
    base = live.module.causal_lm.model
    base.layers[1].register_forward_hook(lambda module, args, output: args[0] + 0 * output.detach())
    told = steps(live, checks.FirstSteps(live, recipe))
    assert len(told) == 1 and "model.layers.1" in told[0] and "no gradient" in told[0]


def test_the_first_loss_is_judged_once(folder: Path) -> None:
    live, recipe = engine(folder)
    first = checks.FirstSteps(live, recipe)
    told = first.after_update(math.log(toy.VOCABULARY))
    assert len(told) == 1 and "untrained or not loaded" in told[0]
    assert not any("untrained" in text for text in first.after_update(math.log(toy.VOCABULARY)))


def test_what_is_live_tells_engine_and_kernels(folder: Path) -> None:
    one, _ = engine(folder, method="lora", lora={"rank": 4, "alpha": 8.0})
    found = checks.live(one)
    assert found["engine"]["engine"] == "single" and json.loads(json.dumps(found)) == found
    assert found["kernels"]["counts"]["LlamaRMSNorm"] == 5
    one.module.kernels.skipped["Linear"] = "differs by 0.1"
    told = checks.kernels_told(checks.live(one)["kernels"])
    assert "5 LlamaRMSNorm" in told and "left alone: Linear (differs by 0.1)" in told


@pytest.mark.parametrize(
    ("key", "value"),
    [("engine", "ddp"), ("world_size", 3), ("optimizer_dtype", "torch.bfloat16"), ("device", "cuda:0")],
)
def test_an_engine_that_is_not_what_was_asked_ends_the_run(folder: Path, key: str, value: Any) -> None:
    live, recipe = engine(folder)
    facts = {**live.facts(), key: value}
    live.facts = lambda: facts
    with pytest.raises(RunError, match="not what the recipe asks for") as caught:
        checks.FirstSteps(live, recipe)
    assert f"{key}: asked" in caught.value.why and str(value) in caught.value.why


def test_a_base_that_is_not_quantised_as_asked_ends_the_run(folder: Path) -> None:
    pytest.importorskip("bitsandbytes")
    live, recipe = engine(folder, method="qlora", lora={"rank": 4, "alpha": 8.0})
    assert checks.live_facts(live)["quantisation"] == "nf4, double"
    checks.FirstSteps(live, recipe)
    other = recipe.model_copy(update={"quantization": Quantization(type="fp4", double_quantization=False)})
    with pytest.raises(RunError) as caught:
        checks.FirstSteps(live, other)
    assert "quantisation: asked fp4, single, found nf4, double" in caught.value.why
    plain, _ = engine(folder, method="lora", lora={"rank": 4, "alpha": 8.0})
    with pytest.raises(RunError, match="not what"):
        checks.FirstSteps(plain, recipe)


@pytest.mark.parametrize(
    ("name", "found"), [("ddp", "LossModel"), ("fsdp2", "LossModel"), ("deepspeed", "Linear")]
)
def test_a_wrapper_that_is_not_there_is_found(name: str, found: str) -> None:
    recipe = toy.recipe(engine={"name": name, "processes": 2})
    assert f"found {found}" in "; ".join(checks.compare_facts({"engine_class": found}, recipe, 2))


def test_ranks_with_the_same_rows_are_found(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    live, _ = engine(folder)
    live.ranks = Ranks(0, 2, 0)

    def everyone_like_me(found: list[int], mine: int) -> None:
        found[:] = [mine, mine]

    monkeypatch.setattr(checks.dist, "all_gather_object", everyone_like_me)
    with pytest.raises(RunError, match="same rows"):
        checks.ranks_differ(toy.micro_batches(0, 1, 0), live)
