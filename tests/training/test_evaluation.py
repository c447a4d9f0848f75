"""Case L05: the held-out loss is per trained token, whatever the batch size."""

import json
from pathlib import Path

import pytest
import torch

from shardwise.errors import DataError


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
