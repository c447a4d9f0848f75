"""Case L05: the held-out loss is per trained token, whatever the batch size."""

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.errors import DataError
from shardwise.runs import RunFolder


def test_l05_loss_is_the_same_for_every_batch_size(tiny_model: Path, tmp_path: Path) -> None:
    from shardwise.recipe import parse_recipe
    from shardwise.training.evaluation import held_out, score
    from shardwise.training.model import LossModel, ModelFolder

    file = tmp_path / "rows.jsonl"
    rows = [
        {"messages": [{"role": "user", "content": "go"}, {"role": "assistant", "content": "the cat " * n}]}
        for n in (1, 2, 3, 5, 8, 13, 21, 34)
    ]
    file.write_text("".join(json.dumps(r) + "\n" for r in rows))
    recipe = parse_recipe(
        f"model: {tiny_model}\ndata: {{train: {file}, sequence_length: 256}}\ntraining: {{precision: fp32}}\n"
    )
    folder = ModelFolder(tiny_model, recipe)
    module = LossModel(folder.load(), "chunked")
    rows_held = held_out(recipe, folder, str(file))
    found = [score(module, rows_held, size) for size in (1, 2, 8)]
    assert max(abs(f.loss - found[0].loss) for f in found) < 1e-5
    # by hand: every row alone, summed over its labels
    total, count = 0.0, 0
    for i in range(len(rows_held)):
        ids, labels = rows_held.row(i)
        with torch.no_grad():
            logits = module.model(input_ids=torch.tensor([ids.tolist()])).logits[0, :-1]
        targets = torch.tensor(labels[1:].tolist())
        total += float(torch.nn.functional.cross_entropy(logits, targets, reduction="sum", ignore_index=-100))
        count += int((targets != -100).sum())
    assert abs(found[0].loss - total / count) < 1e-5 and found[0].trained_tokens == count
    none = rows_held.select(rows_held.trained < 0)
    with pytest.raises(DataError):
        score(module, none, 2)


def test_l05_loss_is_the_same_for_every_number_of_ranks_and_in_the_runs_own_record(
    small_run: Callable[[str], RunFolder], shardwise: Callable[..., Any]
) -> None:
    """Three rows on two ranks, unequal shares; and the number that training itself wrote down."""
    run = small_run("full")
    found = []
    for processes, batch_size in ((1, 8), (2, 1)):
        done = shardwise(
            "eval",
            run.path,
            "--processes",
            processes,
            "--batch-size",
            batch_size,
            "--json",
            OMP_NUM_THREADS="1",
        )
        assert done.returncode == 0, done.stderr
        found.append(json.loads(done.stdout))
    assert len({(f["trained_tokens"], f["rows"]) for f in found}) == 1
    assert max(abs(f["loss"] / found[0]["loss"] - 1) for f in found) < 1e-6
    summary = run.summary()
    assert summary is not None and summary.evaluation_after is not None
    assert abs(found[0]["loss"] / summary.evaluation_after - 1) < 1e-6


def test_tasks_need_an_extra_which_the_error_names(
    small_run: Callable[[str], RunFolder], shardwise: Callable[..., Any]
) -> None:
    run = small_run("full")
    assert shardwise("eval", run.path, "--limit", 3).returncode == 2
    done = shardwise("eval", run.path, "--tasks", "no_such_task")
    assert done.returncode == 2
    if importlib.util.find_spec("lm_eval") is None:
        assert "pip install 'shardwise[lm-eval]'" in done.stderr
    else:
        assert "unknown task of lm-eval 'no_such_task'" in done.stderr
