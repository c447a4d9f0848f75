"""Held-out loss of a run's model: `python -m shardwise.training.evaluation RUN ...`; started by the command line.

The loss is the sum over all trained tokens divided by their count, so it does not depend on how rows are
grouped into batches; rows without a trained token add nothing to either.
"""

import argparse
import json
import math
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from shardwise.data import Rows
from shardwise.errors import DataError, ShardwiseError
from shardwise.recipe import Recipe, parse_recipe
from shardwise.recipe.schema import Source
from shardwise.runs import RunFolder
from shardwise.training.batches import pack
from shardwise.training.export.main import as_trained
from shardwise.training.model import LossModel, ModelFolder
from shardwise.training.rows import prepared_rows


@dataclass(frozen=True)
class Score:
    """`loss`: mean over `trained_tokens` of -log p, in nats; `perplexity` = exp(loss)."""

    loss: float
    perplexity: float
    trained_tokens: int
    rows: int
    rows_without_label: int


@torch.no_grad()
def score(module: LossModel, rows: Rows, batch_size: int) -> Score:
    """Evaluate `rows`, `batch_size` at a time. Raises DataError when no row has a trained token."""
    module.eval()
    device = next(module.parameters()).device
    labelled = [i for i in range(len(rows)) if int(rows.trained[i]) > 0]
    if not labelled:
        raise DataError(
            "no row has a trained token", f"{len(rows)} rows were read", "look at them: shardwise data check"
        )
    total, count = 0.0, 0
    for first in range(0, len(labelled), batch_size):
        batch = pack(rows, [tuple(labelled[first : first + batch_size])])
        total += float(module(batch.to(device)))
        count += batch.trained_tokens
    loss = total / count
    return Score(loss, math.exp(min(loss, 700.0)), count, len(rows), len(rows) - len(labelled))


def held_out(recipe: Recipe, folder: ModelFolder, data: str | None) -> Rows:
    """The run's held-out rows, or those of another file, prepared as the run's were. Raises DataError without any."""
    section = recipe.data
    if data is not None:
        section = section.model_copy(update={"train": (Source(path=data),), "validation": 0})
    prepared = prepared_rows(folder, section)
    rows = prepared.train if data is not None else prepared.validation
    if rows is None or len(rows) == 0:
        raise DataError("the run has no held-out rows", "data.validation was 0", "give rows with --data FILE")
    return rows


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("run", type=Path)
    parser.add_argument("--data")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--checkpoint")
    parser.add_argument("--base", action="store_true")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(arguments)
    run = RunFolder(given.run)
    try:
        recipe = parse_recipe(run.recipe_text(), str(run.recipe_path))
        folder = ModelFolder(Path(recipe.model.source), recipe)
        rows = held_out(recipe, folder, given.data)
        model: Any = folder.load() if given.base else as_trained(run, recipe, folder, given.checkpoint)
        if torch.cuda.is_available() and recipe.method != "qlora":
            model = model.to("cuda")
        loss = "chunked" if recipe.training.loss == "auto" else recipe.training.loss
        found = score(LossModel(model, loss), rows, given.batch_size)
    except ShardwiseError as problem:
        print(problem, file=sys.stderr)
        return problem.exit_code
    if given.json:
        print(json.dumps(asdict(found)))
        return 0
    print(f"held-out loss  {found.loss:.6f} per trained token (perplexity {found.perplexity:.3f})")
    note = f", {found.rows_without_label} of them without one" if found.rows_without_label else ""
    print(f"over           {found.trained_tokens:,} trained tokens in {found.rows:,} rows{note}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
