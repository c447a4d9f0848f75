"""Held-out loss of a run's model: `python -m shardwise.training.evaluation RUN ...`; started by the command line.

The loss is the sum over all trained tokens divided by their count, so it does not depend on how rows are
grouped into batches or dealt out to ranks; rows without a trained token add nothing to either. Sums are kept in
fp64. With --tasks the model is given to lm-evaluation-harness instead.
"""

import argparse
import json
import math
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers.utils import logging

from shardwise.data import Rows
from shardwise.errors import DataError, MissingDependencyError, RunError, ShardwiseError, unknown_name
from shardwise.recipe import Recipe, parse_recipe
from shardwise.recipe.schema import Source
from shardwise.runs import RunFolder
from shardwise.training import leave
from shardwise.training.batches import pack
from shardwise.training.engines.protocol import Ranks
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
def score(module: LossModel, rows: Rows, batch_size: int, ranks: Ranks = Ranks()) -> Score:  # noqa: B008
    """Evaluate `rows`, `batch_size` at a time; collective with several ranks, each of which takes its share.

    Raises DataError when no row has a trained token.
    """
    module.eval()
    device = next(module.parameters()).device
    labelled = [i for i in range(len(rows)) if int(rows.trained[i]) > 0]
    if not labelled:
        raise DataError(
            "no row has a trained token", f"{len(rows)} rows were read", "look at them: shardwise data check"
        )
    total, count = 0.0, 0
    for first in range(ranks.rank * batch_size, len(labelled), ranks.world_size * batch_size):
        batch = pack(rows, [tuple(labelled[first : first + batch_size])])
        total += float(module(batch.to(device)))
        count += batch.trained_tokens
    if ranks.world_size > 1:
        sums = torch.tensor([total, count], dtype=torch.float64)
        dist.all_reduce(sums)
        total, count = float(sums[0]), int(sums[1])
    loss = total / count
    return Score(loss, math.exp(min(loss, 700.0)), count, len(rows), len(rows) - len(labelled))


def held_out(recipe: Recipe, folder: ModelFolder, data: str | None) -> Rows:
    """The run's held-out rows, or those of another file, prepared as the run's were. Raises DataError without any."""
    section = recipe.data
    if data is not None:
        section = section.model_copy(
            update={"train": (Source(path=data),), "validation": 0, "streaming": False}
        )
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
    parser.add_argument("--tasks")
    parser.add_argument("--limit", type=int)
    given = parser.parse_args(arguments)
    run = RunFolder(given.run)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    world = int(os.environ.get("WORLD_SIZE", "1"))
    ranks = Ranks(int(os.environ.get("RANK", "0")), world, int(os.environ.get("LOCAL_RANK", "0")))
    try:
        if given.tasks:
            harness()
        if world > 1:
            dist.init_process_group("gloo")  # for two numbers
        recipe = parse_recipe(run.recipe_text(), str(run.recipe_path))
        folder = ModelFolder(Path(recipe.model.source), recipe)
        rows = None if given.tasks else held_out(recipe, folder, given.data)
        model: Any = folder.load() if given.base else as_trained(run, recipe, folder, given.checkpoint)
        if torch.cuda.is_available() and recipe.method != "qlora":
            model = model.to(torch.device("cuda", ranks.local_rank))
        if rows is None:
            _show_tasks(on_tasks(model, folder, given.tasks, given.batch_size, given.limit), given.json)
            return 0
        loss = "chunked" if recipe.training.loss == "auto" else recipe.training.loss
        found = score(LossModel(model, loss), rows, given.batch_size, ranks)
    except ShardwiseError as problem:
        print(problem, file=sys.stderr)
        return problem.exit_code
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    if ranks.rank == 0:
        _show(found, given.json)
    return 0


def _show(found: Score, as_json: bool) -> None:
    if as_json:
        print(json.dumps(asdict(found)))
        return
    print(f"held-out loss  {found.loss:.6f} per trained token (perplexity {found.perplexity:.3f})")
    note = f", {found.rows_without_label} of them without one" if found.rows_without_label else ""
    print(f"over           {found.trained_tokens:,} trained tokens in {found.rows:,} rows{note}")


def harness() -> Any:
    """The package lm_eval. Raises MissingDependencyError."""
    try:
        import lm_eval
    except ImportError:
        raise MissingDependencyError(
            "--tasks needs the package lm-eval",
            "it is not installed",
            "pip install 'shardwise[lm-eval]'; without --tasks the held-out loss is measured",
        ) from None
    return lm_eval


def on_tasks(
    model: Any,
    folder: ModelFolder,
    tasks: str,
    batch_size: int,
    limit: int | None,
    include: str | None = None,
) -> dict[str, Any]:
    """Results of lm-evaluation-harness by task, as it gives them. `include`: a folder with more tasks.

    Raises MissingDependencyError, and UnknownNameError for a task it does not know.
    """
    lm_eval = harness()
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager
    from transformers import AutoTokenizer

    known = TaskManager(include_path=include)
    names = [name.strip() for name in tasks.split(",")]
    unknown = [n for n in names if n not in known.all_tasks]
    if unknown:
        raise unknown_name("task of lm-eval", unknown[0], known.all_tasks)
    wrapped = HFLM(
        pretrained=model, tokenizer=AutoTokenizer.from_pretrained(folder.path), batch_size=batch_size
    )
    try:
        found = lm_eval.simple_evaluate(model=wrapped, tasks=names, limit=limit, task_manager=known)
    except (OSError, ValueError) as problem:  # most often: its rows cannot be fetched
        raise RunError(
            f"lm-eval could not run {tasks}",
            f"{type(problem).__name__}: {str(problem).splitlines()[0] if str(problem) else ''}",
            "tasks fetch their rows from the Hugging Face hub: look at HF_HUB_OFFLINE and the network",
        ) from None
    results: dict[str, Any] = found["results"]
    return results


def _show_tasks(found: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(found, default=str))
        return
    for task, numbers in found.items():
        for name, value in numbers.items():
            if isinstance(value, float) and "stderr" not in name:
                print(f"{task}  {name.split(',')[0]}  {value:.4f}")


if __name__ == "__main__":
    leave.run(main)
