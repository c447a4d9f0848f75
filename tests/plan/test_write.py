"""Recipes that a plan writes are taken as they are: legal, and resolved to the very stack that was planned."""

import json
import shlex
from dataclasses import fields
from pathlib import Path

import pytest

from shardwise.cli.plan import _question
from shardwise.cli.plan import plan as command
from shardwise.estimate.stack import Stack
from shardwise.facts.model import read_model
from shardwise.launch.cluster import offer_of, spread
from shardwise.plan.model import DataFacts
from shardwise.plan.question import Answer
from shardwise.plan.resolve import resolve
from shardwise.plan.search import answer
from shardwise.plan.write import recipe_of
from shardwise.recipe.load import dump_recipe, parse_recipe
from shardwise.rules import check
from shardwise.rules.problem import Situation

GOLDEN = Path(__file__).parents[1] / "golden" / "plans"
QUESTIONS = {
    p.stem: p.read_text().splitlines()[0].removeprefix("$ shardwise plan ") for p in GOLDEN.glob("*.txt")
}
# What the search decides, and so what a recipe has to bring across.
DECIDED = (
    "method", "sharding", "world_size", "gpus_per_node", "dp_replicate", "offload_optimizer", "offload_parameters",
    "micro_batch_size", "sequence_length", "gradient_accumulation_steps", "precision", "master_weights",
    "activation_checkpointing", "loss", "compile", "lora_rank", "lora_targets", "device",
)  # fmt: skip


def asked(words: str) -> tuple[str, Answer]:
    context = command.make_context("plan", shlex.split(words))
    flags = {k: v for k, v in context.params.items() if k not in ("as_json", "explain", "write")}
    model = flags.pop("model")
    shape = read_model(model, None)
    return model, answer(_question(model, shape, flags)[0])


def test_every_decision_is_a_field() -> None:
    assert set(DECIDED) <= {f.name for f in fields(Stack)}


@pytest.mark.parametrize("name", sorted(QUESTIONS))
def test_what_a_plan_writes_is_legal_and_the_same_stack(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every option of every golden question: the recommended one, and the best of every engine."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    model, found = asked(QUESTIONS[name])
    shape = found.question.shape
    seen: set[tuple[str, str, str]] = set()
    for option in found.options:
        planned = option.plan.stack
        kind = (planned.method, planned.sharding, planned.offload_optimizer)
        if kind in seen:
            continue
        seen.add(kind)
        recipe = parse_recipe(dump_recipe(recipe_of(option, model, "train.jsonl", 1.0), full=False))
        whole = spread(recipe)
        check(whole, shape, Situation())
        decided, plan = resolve(whole, shape, offer_of(recipe), DataFacts(tokens=10**7), Situation())
        check(decided, shape, Situation())
        for field in DECIDED:
            assert getattr(plan.stack, field) == getattr(planned, field), (option.label, field)
    assert seen or found.recommended is None


def test_m18_rows_are_counted_with_the_model_s_tokenizer_and_steps_are_the_trainer_s(
    tiny_model: Path, chat_file: Path, tmp_path: Path
) -> None:
    """M18, D20, D25: the plan's steps and those `train` decides for the recipe it wrote are one number."""
    from click.testing import CliRunner

    from shardwise.launch.job import decide
    from shardwise.recipe import load_recipe

    recipe = tmp_path / "recipe.yaml"
    question = f"{tiny_model} --data {chat_file} --epochs 1.5 --gpus cpu --sequence-length 64 --method lora"
    words = shlex.split(f"{question} --global-batch-size 4 --json --write {recipe}")
    done = CliRunner().invoke(command, words, catch_exceptions=False)
    found = json.loads(done.stdout)
    assert any("counted with the model's tokenizer" in note for note in found["notes"])
    job = decide(load_recipe(recipe))
    assert any(
        f"{job.plan.stack.labelled_share:.0%} of tokens have a label" in a for a in found["assumptions"]
    )
    assert found["recommended"]["steps"] == job.plan.steps
    assert found["question"]["tokens"] == int(job.prepared.train.lengths.sum())
    rows, stack = job.prepared.train, job.plan.stack
    drawn = [n for n in rows.lengths.tolist() for _ in range(n)]  # the length of every token's row
    assert stack.document_tokens == pytest.approx(sum(drawn) / len(drawn))
    assert stack.labelled_share == pytest.approx(sum(rows.trained) / len(drawn)) and stack.labelled_share < 1


def test_without_a_tokenizer_the_approximation_is_said_aloud(
    chat_file: Path, tmp_path: Path, shardwise
) -> None:
    question = ("meta-llama/Llama-3.1-8B", "--data", chat_file, "--gpus", "RTX4090")
    done = shardwise("plan", *question, cwd=tmp_path, HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path))
    assert "tokens are counted as bytes / 4" in done.stdout
    assert "is not on this machine" in done.stdout
