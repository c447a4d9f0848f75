"""`shardwise trace`: what is left open is said, what cannot be traced is refused."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from shardwise.cli.trace import trace
from shardwise.errors import ModelError, RecipeError

CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 512, "hidden_size": 64,
    "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "tie_word_embeddings": False,
}  # fmt: skip


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    path = tmp_path / "recipe.yaml"
    path.write_text(f"model: {tmp_path}\ndata: {{train: rows.jsonl, sequence_length: 64}}\n")
    return path


def run(*arguments: str):
    return CliRunner().invoke(trace, arguments, catch_exceptions=True)


def test_the_result_is_json_and_open_choices_are_said(recipe: Path):
    result = run(str(recipe), "--json")
    assert result.exit_code == 0, result.exception
    answer = json.loads(result.stdout)
    assert answer["peak_allocated_bytes"] == max(p["bytes"] for p in answer["phases"].values())
    assert answer["formula_allocated_bytes"] == pytest.approx(answer["peak_allocated_bytes"], rel=0.05)
    assert {"forward", "loss", "backward", "step", "evaluation", "save"} <= set(answer["phases"])
    adapters = 2 * 16 * (2 * 128 + 2 * 96 + 3 * 192)  # layers x rank x (in + out) of q o, k v, gate up down
    assert answer["save_copy_bytes"] == pytest.approx(12 * adapters, rel=1e-3)  # fp32 weights and two states
    assert sum(part["bytes"] for part in answer["peak_parts"]) == answer["peak_allocated_bytes"]
    assert any(part["module"].endswith("layers.*.mlp.up_proj") for part in answer["peak_parts"])
    assert any("/modeling_llama.py:" in part["source"] for part in answer["peak_parts"])
    assert "training.precision is auto: traced with bf16" in result.stderr


@pytest.mark.parametrize(
    "setting, error",
    [
        ("data.sequence_length=auto", RecipeError),
        ("model.source=nowhere/at-all", ModelError),
        ("training.global_batch_size=3", RecipeError),
    ],
)
def test_what_cannot_be_traced_is_refused(recipe: Path, setting: str, error: type):
    result = run(str(recipe), "--set", setting, "--set", "training.micro_batch_size=2")
    assert isinstance(result.exception, error)


@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_engines_of_several_ranks_are_traced_by_one_process(recipe: Path, engine: str):
    settings = ("--set", f"engine.name={engine}", "--set", "training.micro_batch_size=1")
    result = run(str(recipe), "--processes", "4", "--json", *settings)
    assert result.exit_code == 0, result.exception
    answer = json.loads(result.stdout)
    assert answer["world_size"] == 4
    assert answer["formula_allocated_bytes"] == pytest.approx(answer["peak_allocated_bytes"], rel=0.1)


def test_deepspeed_is_traced_on_a_device_of_its_own(recipe: Path):
    """In a process of its own, since the device cannot be taken back."""
    command = [
        sys.executable, "-m", "shardwise.cli.main", "trace", str(recipe), "--processes", "4", "--json",
        "--set", "engine.name=deepspeed", "--set", "engine.deepspeed.offload_optimizer=cpu",
        "--set", "training.micro_batch_size=1",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    phases = json.loads(done.stdout)["phases"]
    assert "optimizer" not in phases["step"]["terms"]  # its states lie in host memory
    assert phases["step"]["terms"]["weights"] > 0
