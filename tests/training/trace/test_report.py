"""`shardwise trace`: what is left open is said, what cannot be traced is refused."""

import json
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
