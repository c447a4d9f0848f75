"""Launched runs as the machine that launched them knows them: `RUNS/launches/NAME`, and what became of each.

launches/NAME/
  recipe.yaml   what runs: the recipe, decided where model and data could be read from here
  plan.json     its plan, when it was decided here
  job.sbatch, job.yaml, task.yaml, driver.py or node.sh
  job.json      target, the scheduler's id, where the run folder is
  outcome.json  exit code and reason, written by the first node where it can write here
"""

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from shardwise.errors import UsageError, unknown_name
from shardwise.launch.cluster import ranks_per_node
from shardwise.launch.local import TAIL_LINES
from shardwise.launch.rank import stop_path
from shardwise.launch.targets import slurm
from shardwise.launch.targets.parts import OUTCOME, PLAN, RECIPE, Launched, Seen, Target
from shardwise.recipe import Recipe, dump_recipe
from shardwise.runs import RunFolder, is_run
from shardwise.runs.create import check_name
from shardwise.runs.jsonfile import read_json, write_json, write_text

TARGETS = ("torchrun", "slurm", "kubernetes", "ray", "skypilot")
LAUNCHES = "launches"
LONGEST_DEFAULT_NAME = 40  # Kubernetes adds its own words to a name and takes 63 characters in all
JOB = "job.json"
CANCELLED = "cancelled"


@dataclass(frozen=True)
class Submission:
    """job.json. `run_path` may lie where only the cluster sees it."""

    name: str
    target: str
    job_id: str
    run_path: str
    submitted_unix_seconds: float
    folder: Path

    @property
    def run(self) -> RunFolder | None:
        """The run folder, once there is one and if it can be seen from here."""
        path = Path(self.run_path)
        return RunFolder(path) if is_run(path) else None


def target(name: str) -> Target:
    """The module of a scheduler. Raises UnknownNameError."""
    if name not in TARGETS:
        raise unknown_name("target", name, ("local", *TARGETS))
    module: Any = import_module(f"shardwise.launch.targets.{name}")
    return module


def default_name(recipe: Recipe) -> str:
    """Model, method and time, in characters and of a length that every scheduler takes."""
    end = f"-{recipe.method}-{time.strftime('%m%d-%H%M%S')}"
    model = "".join(c if c.isascii() and c.isalnum() else "-" for c in Path(recipe.model.source).name.lower())
    model = model.strip("-")
    if not model[:1].isalpha():
        model = f"run-{model}"
    return model[: LONGEST_DEFAULT_NAME - len(end)].strip("-") + end


def require_name(name: str, folder: Path, free: bool) -> None:
    """Raise UsageError, before any work is done for nothing, for a name that cannot be launched from `folder`.

    `free`: it must not have been launched already.
    """
    check_name(name)
    if name == LAUNCHES:
        raise UsageError(f"run name '{name}'", "that folder holds what was launched", "choose another --name")
    if free and (folder / LAUNCHES / name).exists():
        raise _taken(name, folder / LAUNCHES / name)


def prepare(recipe: Recipe, name: str, decided: Recipe | None) -> Launched:
    """The run as its scheduler will see it; nothing is written. `decided` counts all ranks of all nodes."""
    processes = ranks_per_node(recipe)
    carried = decided or recipe
    carried = carried.model_copy(
        update={
            "engine": carried.engine.model_copy(update={"processes": processes}),
            "run": carried.run.model_copy(update={"name": name}),
        }
    )
    text = dump_recipe(
        carried, comment=f"recipe of run {name}, as launched; keys left out have their defaults", full=False
    )
    folder = (Path(recipe.run.folder) / LAUNCHES / name).resolve()
    return Launched(name, carried, folder, text, _mounts(recipe))


def _mounts(recipe: Recipe) -> Mapping[str, str]:
    """Local files of a recipe -> where they must lie on another machine: where the recipe says."""
    sources = recipe.data.train + (
        recipe.data.validation if isinstance(recipe.data.validation, tuple) else ()
    )
    named = [recipe.model.source, *(s.path for s in sources)]
    named += [recipe.model.chat_template] if recipe.model.chat_template else []
    return {str(Path(path).resolve()): path for path in named if Path(path).exists()}


def submit(run: Launched, name: str, plan_json: Mapping[str, Any] | None) -> Submission:
    """Write the launch folder and give its script to the scheduler; nothing is left where that refuses.

    Raises UsageError when the name is taken, and what the scheduler says.
    """
    module = target(name)
    text = module.render(run)
    with _undone_on_error() as made:
        _write(run, plan_json, made)
        write_text(run.folder / module.SCRIPT, text)
        job_id = module.submit(run.folder / module.SCRIPT, run)
    return _keep(run, name, job_id)


def submit_array(
    name: str, runs: Sequence[Launched], plans: Sequence[Mapping[str, Any] | None]
) -> list[Submission]:
    """Several runs as one Slurm job array called `name`, each with a launch folder of its own.

    Raises UsageError when a name is taken, and what Slurm says; nothing is left then.
    """
    folder = runs[0].folder.parent / name
    texts = [slurm.render(run, name) for run in runs]
    text = slurm.render_array(name, runs, folder)
    with _undone_on_error() as made:
        for run, plan_json, one in zip(runs, plans, texts, strict=True):
            _write(run, plan_json, made)
            write_text(run.folder / slurm.SCRIPT, one)
        _make(name, folder, made)
        write_text(folder / slurm.ARRAY_SCRIPT, text)
        job_id = slurm.submit(folder / slurm.ARRAY_SCRIPT, runs[0])
    return [_keep(run, "slurm", f"{job_id}_{number}") for number, run in enumerate(runs)]


@contextmanager
def _undone_on_error() -> Iterator[list[Path]]:
    """Folders added to the list are removed again when what follows fails."""
    made: list[Path] = []
    try:
        yield made
    except BaseException:
        for folder in made:
            for path in folder.iterdir():
                path.unlink()
            for empty in (folder, folder.parent, folder.parent.parent):
                with suppress(OSError):  # only those that hold nothing else
                    empty.rmdir()
        raise


def _write(run: Launched, plan_json: Mapping[str, Any] | None, made: list[Path]) -> None:
    _make(run.name, run.folder, made)
    write_text(run.folder / RECIPE, run.recipe_text)
    if plan_json is not None:
        write_json(run.folder / PLAN, dict(plan_json))


def _make(name: str, folder: Path, made: list[Path]) -> None:
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        raise _taken(name, folder) from None
    made.append(folder)


def _taken(name: str, folder: Path) -> UsageError:
    return UsageError(f"'{name}' was launched already", f"{folder} is there", "choose another --name")


def _keep(run: Launched, target_name: str, job_id: str) -> Submission:
    run_path = str(Path(run.run_path).absolute())
    found = Submission(run.name, target_name, job_id, run_path, time.time(), run.folder)
    values = asdict(found)
    del values["folder"]
    write_json(found.folder / JOB, values)
    return found


def submissions(folder: Path) -> list[Submission]:
    """Everything launched from here, newest first."""
    found = []
    for path in (folder / LAUNCHES).glob(f"*/{JOB}"):
        values = read_json(path)
        if values:
            found.append(Submission(**values, folder=path.parent.resolve()))
    return sorted(found, key=lambda s: s.submitted_unix_seconds, reverse=True)


def find(name: str, folder: Path) -> Submission:
    """By name or `latest`. Raises UnknownNameError, or UsageError when nothing was launched."""
    known = submissions(folder)
    if not known:
        raise UsageError(
            f"nothing was launched from '{folder}'",
            f"there is no {folder / LAUNCHES}",
            "say where runs are with --folder",
        )
    if name == "latest":
        return known[0]
    for one in known:
        if one.name == name:
            return one
    raise unknown_name("launched run", name, [one.name for one in known])


def look(found: Submission) -> Seen:
    """What the scheduler says."""
    return target(found.target).look(found.job_id)


def outcome(found: Submission, seen: Seen) -> tuple[int, str]:
    """(exit code, reason) of a run that has ended: 0 done, 1 failed, 2 refused, 75 stopped with the state saved.

    The run folder knows best; a refused run has none, and the first node has left a word beside the recipe; else
    the scheduler's own exit code counts.
    """
    run = found.run
    if run is not None:
        status = run.read_status()
        return 0 if status.state == "done" else status.exit_code or 1, status.reason
    told = read_json(found.folder / OUTCOME) or {}
    if "exit_code" in told:
        return int(told["exit_code"]), str(told.get("reason", ""))
    if seen.exit_code is not None:
        return seen.exit_code, f"the scheduler says: {seen.word}"
    return 1, f"there is no run folder at {found.run_path}"


def cancel(found: Submission, now: bool) -> None:
    """Ask the run to save and stop, or end it at once; it is not put back into the queue.

    Raises UsageError where there is nothing to ask, and what the scheduler says.
    """
    run = found.run
    if found.target in ("ray", "torchrun") and not now:
        if run is None and found.target == "torchrun":
            raise UsageError(
                f"'{found.name}' has not started",
                f"there is no run folder at {found.run_path}",
                "start its lines first; they are in its launch folder",
            )
        if run is None:
            now = True  # there is nothing to save yet
        else:
            run.logs_path.mkdir(exist_ok=True)
            stop_path(run).touch()
    mark = found.folder / CANCELLED
    mark.touch()  # before the signal: the script looks for it when the ranks have stopped
    try:
        target(found.target).cancel(found.job_id, now)
    except BaseException:
        mark.unlink(missing_ok=True)
        raise


def logs(found: Submission) -> list[Path]:
    """Every log that can be seen from here: the ranks' of the run folder, then the scheduler's."""
    run = found.run
    ranks = sorted(run.logs_path.glob("rank-*.log"), key=_rank) if run else []
    return [*ranks, *sorted(found.folder.glob("*.out")), *sorted(found.folder.glob("*.log"))]


def _rank(path: Path) -> int:
    number = path.stem.removeprefix("rank-")
    return int(number) if number.isdigit() else 0


def remote_log(found: Submission, lines: int) -> str:
    """What the scheduler keeps of a run whose folder cannot be seen from here; empty where it keeps nothing."""
    read = getattr(target(found.target), "log", None)
    return str(read(found.job_id, lines)) if read is not None else ""


def tail(path: Path, lines: int = TAIL_LINES) -> list[str]:
    """The last lines of a log."""
    with path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 200 * lines))
        text = file.read().decode("utf-8", "replace")
    return [line.rsplit("\r", 1)[-1] for line in text.splitlines() if line.strip()][-lines:]
