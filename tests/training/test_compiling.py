"""torch.compile per layer: the same steps as without, compiled a fixed number of times however rows are packed."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.training import compiling
from shardwise.training.build import build_engine
from shardwise.training.engines.protocol import Ranks
from shardwise.training.model import ModelFolder

sys.path.insert(0, str(Path(__file__).parent / "engines"))
import toy


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy.make_model(tmp_path_factory.mktemp("toy"), hidden=32)


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compilation that was killed elsewhere may have left a broken library in the shared cache."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "inductor"))


def engine(folder: Path, **training: Any) -> Any:
    recipe = toy.recipe(engine={"name": "single", "processes": 1}, training=training)
    return build_engine(recipe, ModelFolder(folder, recipe), torch.device("cpu"), Ranks(), 4)


def graphs() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


# inductor compiles C++, half a minute; aot_eager does all but that.
@pytest.mark.parametrize(("checkpointing", "backend"), [("none", "aot_eager"), (1, "inductor")])
def test_a_compiled_layer_trains_as_before(
    folder: Path, checkpointing: str | int, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiling, "BACKEND", os.environ.get("COMPILE_BACKEND", backend))
    plain = engine(folder, activation_checkpointing=checkpointing)
    torch._dynamo.reset()
    before = graphs()
    fast = engine(folder, activation_checkpointing=checkpointing, compile=True)
    losses = [toy.train(e, range(2), 1e-3, 0.5).losses for e in (plain, fast)]
    in_training = graphs()
    assert in_training > before, "nothing was compiled"
    held_out = [toy.evaluate(e) for e in (plain, fast)]
    compiled = graphs()
    more = [toy.train(e, range(2, 10), 1e-3, 0.5).losses for e in (plain, fast)]
    assert graphs() == compiled, "rows packed otherwise were compiled anew"
    assert losses[1] + more[1] == pytest.approx(losses[0] + more[0], rel=1e-5)
    assert held_out[1] == pytest.approx(held_out[0], rel=1e-5)
    assert toy.distance(toy.weights(fast), toy.weights(plain)) < 1e-4
