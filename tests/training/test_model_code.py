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
