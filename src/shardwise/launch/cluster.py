"""Deciding a recipe for machines that are not this one, and taking its run folder there."""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from shardwise.errors import RecipeError, UsageError
from shardwise.facts.download import local_folder
from shardwise.facts.gpus import Offer, parse_offer
from shardwise.facts.machine import as_offer
from shardwise.facts.model import read_model
from shardwise.launch.job import Job, facts_of, prepare_rows
from shardwise.plan.resolve import resolve
from shardwise.recipe import Recipe, dump_recipe
from shardwise.rules import check, situation
from shardwise.rules.problem import Situation
from shardwise.runs import RunFolder, create_run
from shardwise.runs.changes import accepted_of, compare
from shardwise.runs.changes import check as check_changes
from shardwise.runs.checkpoints import facts_of as facts_at
from shardwise.runs.jsonfile import read_json, write_json, write_text

Progress = Callable[[str, int, int | None], None]
MARK = "launch.json"  # in the run folder: which job of which scheduler works there


def offer_of(recipe: Recipe) -> Offer:
    """All nodes of `launch` as the planner takes them. Raises UsageError for an unknown GPU."""
    if recipe.launch.gpus is None:
        return as_offer("cpu")
    per_node = parse_offer(recipe.launch.gpus).count
    return parse_offer(f"{recipe.launch.nodes}x{per_node}x{parse_offer(recipe.launch.gpus).gpu.name}")


def ranks_per_node(recipe: Recipe) -> int:
    """One per GPU; on processors what `engine.processes` says, or one. Works on decided recipes too."""
    if recipe.launch.gpus is not None:
        return parse_offer(recipe.launch.gpus).count
    asked = recipe.engine.processes
    return 1 if asked == "auto" else asked


def spread(recipe: Recipe) -> Recipe:
    """The recipe with `engine.processes` counting all ranks of all nodes, for the rules and the planner.

    In every file the key counts the ranks of one node: in recipes, in launch folders and in run folders.

    Raises RecipeError when a GPU run asks for another number of ranks than GPUs.
    """
    per_node, asked = ranks_per_node(recipe), recipe.engine.processes
    if recipe.launch.gpus is not None and asked not in ("auto", per_node):
        raise RecipeError(
            f"engine.processes is {asked}, but launch.gpus is {recipe.launch.gpus}",
            "every rank gets one GPU of its node",
            f"leave engine.processes on auto, or set it to {per_node}",
        )
    engine = recipe.engine.model_copy(
        update={
            "processes": per_node * recipe.launch.nodes,
            "device": "cpu" if recipe.launch.gpus is None else recipe.engine.device,
        }
    )
    return recipe.model_copy(update={"engine": engine})


def decide_for(recipe: Recipe, offer: Offer, here: bool, progress: Progress | None = None) -> Job:
    """As `job.decide`, for an offer of several nodes. `here`: this is one of them, with its installation.

    Raises the UsageError family.
    """
    where = None if here else Situation()
    folder = local_folder(recipe.model.source, recipe.model.revision)
    shape = read_model(str(folder))
    whole = spread(recipe)
    check(whole, shape, where)
    prepared = prepare_rows(whole, folder, shape, progress)
    decided, plan = resolve(whole, shape, offer, facts_of(prepared, whole), where or situation())
    if decided.data != whole.data:
        prepared = prepare_rows(decided, folder, shape, None)
    check(decided, shape, where)
    return Job(decided, plan, shape, prepared, folder)


def ranks_of_a_node(job: Job) -> int:
    """Of a decided job, whose `engine.processes` counts all of them."""
    processes = job.recipe.engine.processes
    assert processes != "auto"
    return processes // job.recipe.launch.nodes


def open_folder(job: Job, name: str, plan_json: Mapping[str, Any], owner: str) -> RunFolder:
    """The run's folder, made by its first attempt and taken over by every later one.

    `owner` names the scheduler's job. The same job started again takes the folder from its own last attempt
    even when that ended without a word on another machine: the scheduler runs a job once at a time. Raises
    UsageError when the run is done already, another job is at work there, or what has changed in the recipe since
    its newest checkpoint is not named in the environment's SHARDWISE_ACCEPT; the folder is as it was then.
    """
    run = RunFolder(Path(job.recipe.run.folder) / name)
    recipe = job.recipe.model_copy(
        update={
            "model": job.recipe.model.model_copy(update={"source": str(job.folder.resolve())}),
            "engine": job.recipe.engine.model_copy(update={"processes": ranks_of_a_node(job)}),
        }
    )
    text = dump_recipe(recipe, comment="the resolved recipe of this run: every default written out")
    if not run.status_path.is_file():
        run = create_run(Path(recipe.run.folder), name, text, plan_json)
        write_json(run.path / MARK, {"owner": owner, "host": os.uname().nodename})
        return run
    if run.read_status().state == "done":
        raise UsageError(
            f"run '{name}' is done already", f"its result is in {run.path}", "choose another --name"
        )
    if (read_json(run.path / MARK) or {}).get("owner") == owner:
        run.lock_path.unlink(missing_ok=True)
    run.acquire()
    try:
        _refuse_changes(run, recipe)
    except BaseException:
        run.release()
        raise
    write_text(run.recipe_path, text)
    write_json(run.path / MARK, {"owner": owner, "host": os.uname().nodename})
    run.status("running")
    if not run.checkpoints():  # what was trained and not saved is gone: readers leave it out
        run.event("resume", step=0)
    return run


def _refuse_changes(run: RunFolder, recipe: Recipe) -> None:
    """Raise UsageError for a recipe that is not the one of the newest checkpoint, but for what is accepted.

    The ranks compare the rest (rows, weights, versions) and record all of it.
    """
    kept = run.checkpoints()
    saved = facts_at(kept[-1].path).get("recipe") if kept else None
    if saved is None:
        return
    changes = compare({"recipe": saved}, {"recipe": recipe.model_dump(mode="json")})
    check_changes(changes, accepted_of(os.environ) & {c.field for c in changes}, kept[-1].step)


def read_plan(path: Path) -> dict[str, Any]:
    """plan.json beside a launched recipe; empty where the plan was not made beforehand."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
