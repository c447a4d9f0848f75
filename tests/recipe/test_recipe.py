"""A recipe reads back as written, and every mistake in it is told with line, section and nearest key."""

import json
import re
from pathlib import Path

import pytest

from shardwise.errors import RecipeError
from shardwise.recipe import Recipe, dump_recipe, load_recipe, parse_recipe
from shardwise.recipe.describe import describe

SHORTEST = "model: some/model\ndata: rows.jsonl\n"


def refused(text: str, *settings: str) -> str:
    with pytest.raises(RecipeError) as caught:
        parse_recipe(text, "r.yaml", settings)
    assert caught.value.exit_code == 2
    return str(caught.value)


def test_two_lines_are_enough() -> None:
    recipe = parse_recipe(SHORTEST)
    assert recipe.model.source == "some/model"
    assert recipe.data.train[0].path == "rows.jsonl"
    assert recipe.method == "lora"


@pytest.mark.parametrize(
    "text",
    [
        SHORTEST,
        "model: m\ndata: [a.jsonl, {path: b.jsonl, weight: 0.5}]\nengine: fsdp2\n",
        "model: m\ndata: {train: a, validation: b.jsonl}\ntraining: {max_steps: 3}\nlora: {targets: [q_proj]}\n",
        "model: m\ndata: {train: a, validation: 0.1}\noptimizer: {betas: [0.9, 0.95], max_grad_norm: null}\n",
    ],
)
@pytest.mark.parametrize("full", [True, False])
def test_written_and_read_back_is_the_same(text: str, full: bool) -> None:
    recipe = parse_recipe(text)
    assert parse_recipe(dump_recipe(recipe, "a comment", full=full)) == recipe


def test_settings_change_single_keys() -> None:
    recipe = parse_recipe(SHORTEST, settings=["lora.rank=8", "model.attention=eager", "data.packing=false"])
    assert (recipe.lora.rank, recipe.model.attention, recipe.data.packing) == (8, "eager", False)
    assert recipe.model.source == "some/model"


def test_g01_unknown_keys_name_line_section_and_nearest(tmp_path: Path) -> None:
    path = tmp_path / "typo.yaml"
    path.write_text(
        "model: ./m\ndata: d\nlearning_rte: 3.0e-4\nlora:\n  rank: 8\n  apha: 32\nrank: 4\nnum-epochs: 3\n"
    )
    with pytest.raises(RecipeError) as caught:
        load_recipe(path)
    text = str(caught.value)
    assert re.search(r"typo.yaml, line 3: unknown key 'learning_rte'.*optimizer.learning_rate", text)
    assert re.search(r"line 6: unknown key 'apha' in section 'lora'.*lora.alpha", text)
    assert re.search(r"line 7: unknown key 'rank'.*lora.rank", text)
    assert re.search(r"line 8: unknown key 'num-epochs'.*training.epochs", text)


def test_g02_numbers_are_numbers_and_booleans_are_strict() -> None:
    recipe = parse_recipe(
        SHORTEST + "optimizer: {learning_rate: 1e-5, weight_decay: 1e-2}\nlora: {alpha: 3e1}\n"
    )
    assert recipe.optimizer.learning_rate == 1e-5
    assert recipe.lora.alpha == 30.0
    assert "line 3" in refused(SHORTEST + 'training: {compile: "false"}\n')
    assert "line 3" in refused(SHORTEST + "training: {compile: no}\n")
    assert "line 3" in refused(SHORTEST + "optimizer: {learning_rate: -1}\n")
    assert "line 3" in refused(SHORTEST + "optimizer: {learning_rate: .nan}\n")
    assert "line 3" in refused(SHORTEST + "training: {global_batch_size: 0}\n")


def test_a_word_for_a_number_is_told_with_its_key() -> None:
    text = refused(SHORTEST + "optimizer:\n  learning_rate: fast\n")
    assert "r.yaml, line 4: optimizer.learning_rate = 'fast'" in text
    assert text.count("\n") == 2


def test_l15_a_warmup_with_a_point_is_a_share() -> None:
    assert isinstance(parse_recipe(SHORTEST + "schedule: {warmup: 1}\n").schedule.warmup, int)
    assert isinstance(parse_recipe(SHORTEST + "schedule: {warmup: 1.0}\n").schedule.warmup, float)
    assert "schedule.warmup" in refused(SHORTEST + "schedule: {warmup: 1.5}\n")
    assert "schedule.warmup" in refused(SHORTEST + "schedule: {warmup_ratio: 0.1}\n")


def test_d19_validation_is_a_count_or_a_share_never_everything() -> None:
    assert parse_recipe("model: m\ndata: {train: a, validation: 1}\n").data.validation == 1
    assert parse_recipe("model: m\ndata: {train: a, validation: 0.1}\n").data.validation == 0.1
    assert "data.validation" in refused("model: m\ndata: {train: a, validation: 1.0}\n")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("- 3\n", "found a list"),
        ("", "found nothing"),
        ("model: m\n", "'data' is missing"),
        ("model: [\n", "not valid YAML"),
        ("model: m\nmodel: n\ndata: d\n", "line 2"),
        (SHORTEST + "training: {epochs: 1, max_steps: 3}\n", "epochs and max_steps"),
    ],
)
def test_what_is_not_a_recipe_is_refused(text: str, says: str) -> None:
    assert says in refused(text)


def test_missing_file_names_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(SHORTEST)
    with pytest.raises(RecipeError, match="does not exist") as caught:
        load_recipe(tmp_path / "recipes.yaml")
    assert "recipe.yaml" in caught.value.hint


def test_set_without_a_value_is_refused() -> None:
    assert "--set lora.rank" in refused(SHORTEST, "lora.rank")


def test_every_key_is_described_and_the_schema_has_it() -> None:
    text = describe()
    schema = json.dumps(Recipe.model_json_schema())
    for section in Recipe.model_fields:
        assert f"{section}:" in text
    for key in ("learning_rate", "reshard_after_forward", "offload_optimizer", "double_quantization"):
        assert key in text and key in schema
