"""How long a run is: budgets in epochs, steps and tokens, the same in planner and trainer."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_toys import chat, write_rows
from hypothesis import given, settings
from hypothesis import strategies as st
from test_order import flat, rows_of

from shardwise.data import make_order, prepare, run_order
from shardwise.errors import DataError, RecipeError
from shardwise.launch.job import decide
from shardwise.recipe import parse_recipe

OPTIONS: dict[str, Any] = {"sequence_length": 40, "packing": True, "global_batch_size": 3, "seed": 5}


@settings(max_examples=80, deadline=None)
@given(
    lengths=st.lists(st.integers(2, 40), min_size=1, max_size=30),
    budget=st.integers(1, 3000),
    weight=st.sampled_from([1.0, 2.0, 0.5, 1.5]),
)
def test_a_token_budget_is_reached_by_its_last_sequence(
    lengths: list[int], budget: int, weight: float
) -> None:
    sources = [i % 2 for i in range(len(lengths))]
    order = make_order(rows_of(lengths, sources, (1.0, weight)), max_tokens=budget, **OPTIONS)
    sequences = [order._size(one) for step in range(order.steps) for one in order.step(step)]
    assert sum(sequences[:-1]) < budget <= sum(sequences)
    assert sum(order.tokens(step) for step in range(order.steps)) == sum(sequences)


def test_a_token_budget_is_the_beginning_of_a_longer_run() -> None:
    rows = rows_of(list(range(2, 40)) * 3)
    long = make_order(rows, epochs=4, **OPTIONS)
    short = make_order(rows, max_tokens=3 * int(rows.lengths.sum()) + 100, **OPTIONS)
    assert [short.step(i) for i in range(short.steps - 1)] == [long.step(i) for i in range(short.steps - 1)]
    assert set(short.step(short.steps - 1)) <= set(long.step(short.steps - 1))
    assert 3 < short.epochs < 3.2


def test_a_part_of_an_epoch_is_that_share_of_its_sequences() -> None:
    rows = rows_of([40] * 10)
    for epochs, sequences in ((0.5, 5), (1.0, 10), (1.55, 16), (2.0, 20), (0.001, 1)):
        order = make_order(rows, epochs=epochs, **OPTIONS)
        assert len(flat(order, range(order.steps))) == sequences
    half = make_order(rows, epochs=1.5, **OPTIONS)
    assert [len(half.step(i)) for i in range(half.steps)] == [3, 3, 3, 1, 3, 2]  # no step crosses an epoch


def test_exactly_one_length_is_given(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="exactly one length"):
        make_order(rows_of([10]), max_tokens=5, max_steps=1, **OPTIONS)
    for given_ in ({"epochs": 1.0, "max_tokens": 5}, {"epochs": 1.0, "max_steps": 2, "max_tokens": 5}):
        with pytest.raises(RecipeError, match="only one length"):
            parse_recipe(json.dumps({"model": "x", "data": "y", "training": given_}))


@pytest.mark.parametrize(
    ("kind", "length"),
    [
        ("chats", {}),
        ("chats", {"epochs": 2.5}),
        ("chats", {"max_tokens": 3000}),
        ("text", {"epochs": 3.0}),
        ("text", {"max_tokens": 20_000}),
        ("weights", {"max_steps": 7}),
        ("weights", {"epochs": 2.5}),
        ("weights", {"max_tokens": 20_000}),
    ],
)
def test_planner_and_trainer_count_the_same_steps(
    tmp_path: Path, tiny_model: Path, monkeypatch: Any, kind: str, length: dict[str, Any]
) -> None:
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path / "cache"))
    rows = [chat(f"question {i}", "answer " * (i % 13 + 1)) for i in range(33)]
    write_rows(tmp_path / "a.jsonl", rows)
    write_rows(tmp_path / "b.jsonl", [{"text": "word " * (i * 7 % 90 + 3)} for i in range(41)])
    files: dict[str, Any] = {
        "chats": "a.jsonl",
        "text": "b.jsonl",
        "weights": [{"path": "a.jsonl", "weight": 0.7}, {"path": "b.jsonl", "weight": 2.0}],
    }
    monkeypatch.chdir(tmp_path)
    text = {"model": str(tiny_model), "data": {"train": files[kind]}, "engine": {"device": "cpu"}}
    job = decide(parse_recipe(json.dumps(text | {"training": {"global_batch_size": 4} | length})))
    recipe = job.recipe
    size = recipe.training.global_batch_size
    assert isinstance(size, int)
    again = prepare(recipe.data, job.folder, seed=recipe.training.seed, max_length=512)
    order = run_order(again.train, recipe, again.sequence_length, size)  # as a rank does it
    assert job.plan.steps == order.steps > 0
    assert len(again.train) == len(job.prepared.train)
    assert (np.asarray(again.train.base) == np.asarray(job.prepared.train.base)).all()
    if "max_tokens" in length:
        tokens = sum(order.tokens(i) for i in range(order.steps))
        assert length["max_tokens"] <= tokens < length["max_tokens"] + again.sequence_length
        assert any(c.key == "optimizer steps" for c in job.plan.choices)
