"""Case S02: code that a model folder brings along runs only when the recipe says so."""

import json
import shutil
from pathlib import Path

import pytest

from shardwise.errors import ShardwiseError


def test_s02_neither_planning_nor_training_runs_a_models_code(
    tiny_model: Path, chat_file: Path, tmp_path: Path
) -> None:
    from shardwise.launch.job import decide
    from shardwise.recipe import parse_recipe
    from shardwise.training.model import ModelFolder

    model = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    marker = tmp_path / "ran"
    config = json.loads((model / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    (model / "config.json").write_text(json.dumps(config))
    (model / "evil.py").write_text(f"open({str(marker)!r}, 'w')\n")
    recipe = parse_recipe(
        f"model: {model}\ndata: {{train: {chat_file}}}\ntraining: {{max_steps: 2, precision: fp32}}\n"
        "engine: {name: single, device: cpu}\n"
    )
    for action in (lambda: decide(recipe), lambda: ModelFolder(model, recipe).load()):
        with pytest.raises(ShardwiseError, match=r"brings its own Python code|trust_remote_code") as caught:
            action()
        assert "model.trust_remote_code" in str(caught.value)
    assert not marker.exists()


def test_s02_code_that_was_allowed_stands_in_the_runs_record(
    tiny_model: Path, chat_file: Path, tmp_path: Path
) -> None:
    from shardwise.recipe import parse_recipe
    from shardwise.runs import RunFolder
    from shardwise.training.main import _record_code
    from shardwise.training.model import ModelFolder

    model = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    (model / "modeling_mine.py").write_text("x = 1\n")
    for allowed in (False, True):
        recipe = parse_recipe(
            f"model: {{source: {model}, trust_remote_code: {str(allowed).lower()}}}\ndata: {chat_file}\n"
        )
        run = RunFolder(tmp_path / str(allowed))
        run.path.mkdir()
        _record_code(run, ModelFolder(model, recipe))
        told = [e.model_dump()["message"] for e in run.events("warning")]
        assert bool(told) == allowed
        assert all("executed modeling_mine.py (SHA-256 " in m for m in told)


def test_s01_no_pickle_of_a_model_folder_is_ever_opened(
    tiny_model: Path, chat_file: Path, tmp_path: Path
) -> None:
    """Beside safetensors they are ignored; alone they are refused by name. No flag opens them."""
    import pickle

    from shardwise.launch.job import decide
    from shardwise.recipe import parse_recipe
    from shardwise.training.model import ModelFolder

    marker = tmp_path / "ran"

    class Payload:
        def __reduce__(self) -> object:
            return (open, (str(marker), "w"))

    model = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    names = ("rng_state.pth", "optimizer.pt", "scheduler.pt", "training_args.bin", "pytorch_model.bin")
    for name in names:
        (model / name).write_bytes(pickle.dumps(Payload()))
    recipe = parse_recipe(
        f"model: {model}\ndata: {{train: {chat_file}}}\ntraining: {{max_steps: 2, precision: fp32}}\n"
        "engine: {name: single, device: cpu}\n"
    )
    decide(recipe)
    ModelFolder(model, recipe).load()
    (model / "model.safetensors").unlink()
    with pytest.raises(ShardwiseError, match="no weights in safetensors") as caught:
        decide(recipe)
    assert all(name in str(caught.value) for name in names)
    with pytest.raises(OSError, match=r"no file named model\.safetensors"):
        ModelFolder(model, recipe).load()
    assert not marker.exists()
