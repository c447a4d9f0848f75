"""`shardwise launch`, `status`, `logs` and `cancel`: a recipe on machines that other schedulers run."""

import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from shardwise.launch.job import Job
    from shardwise.launch.submission import Submission
    from shardwise.launch.targets.parts import Seen
    from shardwise.recipe import Recipe

PLACES = ("local", "torchrun", "slurm", "kubernetes", "ray", "skypilot")
POLL_SECONDS = 2.0
ASK_SECONDS = 30.0  # between looks at a scheduler's log of a run whose folder cannot be seen from here
FOLDER = click.option(
    "--folder", default="runs", show_default=True, type=click.Path(path_type=Path), help="Where runs are."
)


@click.command()
@click.argument(
    "recipe_paths", metavar="RECIPE.yaml...", nargs=-1, required=True, type=click.Path(path_type=Path)
)
@click.option(
    "--on", "place", required=True, type=click.Choice(PLACES), help="What starts the ranks on the nodes."
)
@click.option("--nodes", type=click.IntRange(min=1), help="Machines (launch.nodes).")
@click.option("--gpus", help="GPUs of one node, such as 8xH100-80GB (launch.gpus).")
@click.option("--name", help="Name of the run (run.name).")
@click.option("--preflight", is_flag=True, help="Measure the links between ranks first (launch.preflight).")
@click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="Change one key of the recipe.")
@click.option("--dry-run", is_flag=True, help="Print the script or manifest; write and start nothing.")
@click.option("--no-follow", is_flag=True, help="Return once the scheduler has it.")
def launch(
    recipe_paths: tuple[Path, ...],
    place: str,
    nodes: int | None,
    gpus: str | None,
    name: str | None,
    preflight: bool,
    settings: tuple[str, ...],
    dry_run: bool,
    no_follow: bool,
) -> None:
    """Run RECIPE.yaml on several machines: write what their scheduler runs, submit it, follow it.

    Several recipes are one job array, with --on slurm.
    """
    from shardwise.launch import submission
    from shardwise.recipe import load_recipe

    more = [
        *settings,
        *([f"launch.nodes={nodes}"] if nodes else []),
        *([f"launch.gpus={gpus}"] if gpus else []),
        *(["launch.preflight=true"] if preflight else []),
    ]
    if len(recipe_paths) > 1:
        recipes = [load_recipe(path, more) for path in recipe_paths]
        sys.exit(_array(recipes, [path.stem for path in recipe_paths], place, name, dry_run, no_follow))
    recipe = load_recipe(recipe_paths[0], more)
    if place == "local":
        _local(recipe, name, dry_run)
        return
    name = name or recipe.run.name or submission.default_name(recipe)
    submission.require_name(name, Path(recipe.run.folder), free=not dry_run)
    decided, plan_json = _decide(recipe)
    run = submission.prepare(recipe, name, decided)
    module = submission.target(place)
    if dry_run:
        click.echo(module.render(run), nl=False)
        return
    found = submission.submit(run, place, plan_json)
    if place == "torchrun":
        from shardwise.launch.targets import torchrun

        click.echo("start one line on each node; a node that died rejoins with its own line:", err=True)
        click.echo("\n".join(torchrun.lines(found.folder / torchrun.SCRIPT, run)))
        return
    click.echo(f"{name}: job {found.job_id} on {place}, files in {found.folder}", err=True)
    if not no_follow:
        sys.exit(_follow(found))


def _array(
    recipes: "list[Recipe]", stems: list[str], place: str, name: str | None, dry_run: bool, no_follow: bool
) -> int:
    """Several recipes as tasks of one Slurm job. Returns the first exit code that is not 0, in their order."""
    from shardwise.errors import UsageError
    from shardwise.launch import submission
    from shardwise.launch.targets import slurm

    if place != "slurm":
        raise UsageError(
            f"{len(recipes)} recipes for --on {place}",
            "several recipes are a job array, which Slurm alone has",
            "launch them one by one, or use --on slurm",
        )
    name = name or submission.default_name(recipes[0])
    names = [f"{name}-{stem}" for stem in stems]
    if len(set(names)) < len(names):
        names = [f"{name}-{number}" for number in range(len(stems))]
    for wanted, recipe in zip([name, *names], [recipes[0], *recipes], strict=True):
        submission.require_name(wanted, Path(recipe.run.folder), free=not dry_run)
    decided = [_decide(recipe) for recipe in recipes]
    runs = [submission.prepare(r, n, d) for r, n, (d, _) in zip(recipes, names, decided, strict=True)]
    if dry_run:
        click.echo(slurm.render_array(name, runs, runs[0].folder.parent / name), nl=False)
        for run in runs:
            text = slurm.render(run, name)
            click.echo(f"\n# --- {run.folder / slurm.SCRIPT}\n{text}", nl=False)
        return 0
    found = submission.submit_array(name, runs, [plan for _, plan in decided])
    for one in found:
        click.echo(f"{one.name}: job {one.job_id} on slurm, files in {one.folder}", err=True)
    if no_follow:
        return 0
    codes = []
    for one in found:
        click.echo(f"{one.name}:", err=True)
        codes.append(_follow(one))
    return next((code for code in codes if code), 0)


def _local(recipe: "Recipe", name: str | None, dry_run: bool) -> None:
    from shardwise.cli.train import decide_and_show, run_and_report
    from shardwise.errors import UsageError

    if recipe.launch.nodes > 1:
        raise UsageError(
            f"--on local with launch.nodes {recipe.launch.nodes}",
            "local is this one machine",
            "use --nodes 1, or torchrun, which prints the line for each node",
        )
    if name is not None:
        recipe = recipe.model_copy(update={"run": recipe.run.model_copy(update={"name": name})})
    unused = [key for key in ("gpus", "python", "setup", "cache", "interface") if getattr(recipe.launch, key)]
    if unused:
        keys = ", ".join(f"launch.{key}" for key in unused)
        click.echo(f"not used with --on local, which takes this machine as it is: {keys}", err=True)
    job = decide_and_show(recipe)
    if dry_run:
        click.echo("dry run: nothing was started")
        return
    if recipe.launch.preflight:
        _preflight_here(job)
    run_and_report(job)


def _preflight_here(job: "Job") -> None:
    """The links between the ranks of this machine. Raises RunError when a rank does not answer."""
    from shardwise.launch import preflight
    from shardwise.launch.cluster import ranks_of_a_node
    from shardwise.launch.ports import choose_port

    where = preflight.Where(1, 0, ranks_of_a_node(job), "127.0.0.1", choose_port(None))
    if where.ranks_per_node > 1:
        measured = preflight.measure(where, {})
        assumed = preflight.assumption(job.plan.offer, where)
        click.echo(preflight.as_text(preflight.judge(measured, assumed)), err=True)


def _decide(recipe: "Recipe") -> "tuple[Recipe | None, dict[str, object] | None]":
    """The decided recipe and its plan; (None, None), said aloud, where model or data are only on the nodes."""
    from rich.console import Console

    from shardwise.errors import DataError, ModelError, RunError
    from shardwise.launch.cluster import decide_for, offer_of
    from shardwise.report.decided import decided_json, decided_text

    console = Console(stderr=True, highlight=False)
    offer = offer_of(recipe)
    try:
        with console.status("reading the model and preparing rows ..."):
            job = decide_for(recipe, offer, here=False)
    except (DataError, ModelError, RunError) as problem:
        click.echo(f"not decided here, but on the first node: {problem.what} ({problem.why})", err=True)
        return None, None
    console.print(decided_text(job.plan))
    return job.recipe, dict(decided_json(job.plan))


def _follow(found: "Submission") -> int:
    """Print state and progress until the run has ended. Ctrl-C leaves the run alone."""
    from shardwise.launch import submission

    said, printed, line, ask_at = "", 0, "", 0.0
    try:
        while True:
            seen = submission.look(found)
            if f"{seen.state}: {seen.word}" != said:
                said = f"{seen.state}: {seen.word}"
                click.echo(f"{time.strftime('%H:%M:%S')} {said}", err=True)
            printed = _print_steps(found, printed)
            if found.run is None and seen.state == "running" and time.monotonic() >= ask_at:
                ask_at = time.monotonic() + ASK_SECONDS
                line = _last_remote_line(found, line)
            if seen.state == "ended":
                return _ended(found, seen)
            time.sleep(POLL_SECONDS)
    except KeyboardInterrupt:
        click.echo(
            f"the run goes on; look with: shardwise status {found.name}, stop it with: shardwise cancel {found.name}",
            err=True,
        )
        return 0


def _print_steps(found: "Submission", offset: int) -> int:
    """Print the newest step since byte `offset` of the events; returns where to look next."""
    run, last = found.run, None
    if run is None:
        return offset
    for behind, event in run.events_from(offset):
        offset = behind
        if event.kind == "step":
            last = event.model_dump()
    if last is not None:
        click.echo(f"step {last['step']}  loss {last['loss']:.4f}", err=True)
    return offset


def _ended(found: "Submission", seen: "Seen") -> int:
    """Tell how it ended, with the log of the rank that failed first. Returns the exit code."""
    from shardwise.launch import submission

    code, reason = submission.outcome(found, seen)
    word = {0: "done", 2: "refused", 75: "stopped, with its state saved"}.get(code, "failed")
    click.echo(f"{found.name} is {word}" + (f": {reason}" if reason else ""), err=True)
    run = found.run
    if code == 0:
        if run is not None:
            click.echo(f"result: {run.result_path}; see: shardwise show {run.path}", err=True)
        return 0
    if code == 75:
        return code
    first = next((w for w in reason.split() if w.isdigit()), "0")
    path = run.logs_path / f"rank-{first}.log" if run else Path()
    if not path.is_file():
        path = next(iter(submission.logs(found)), Path())
    if path.is_file():
        click.echo(f"--- {path}", err=True)
        click.echo("\n".join(submission.tail(path)), err=True)
    elif run is None:
        _say_remote_log(found)
    return code


def _last_remote_line(found: "Submission", said: str) -> str:
    """Print the newest line of the scheduler's log unless it was `said` already; returns it."""
    from shardwise.errors import ShardwiseError
    from shardwise.launch import submission

    with suppress(ShardwiseError):
        lines = submission.remote_log(found, 1).strip().splitlines()
        if lines and lines[-1] != said:
            click.echo(lines[-1], err=True)
            return lines[-1]
    return said


def _say_remote_log(found: "Submission") -> None:
    from shardwise.errors import ShardwiseError
    from shardwise.launch import submission

    with suppress(ShardwiseError):  # it is told how the run ended already
        click.echo(submission.remote_log(found, submission.TAIL_LINES), err=True, nl=False)


@click.command()
@click.argument("name", required=False)
@FOLDER
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def status(name: str | None, folder: Path, as_json: bool) -> None:
    """Launched runs: what the scheduler says, and how far each is. NAME or 'latest' for one."""
    import json

    from shardwise.launch import submission

    found = [submission.find(name, folder)] if name else submission.submissions(folder)
    rows = [_row(one) for one in found]
    if as_json:
        click.echo(json.dumps(rows[0] if name else rows, indent=2))
        return
    if not rows:
        click.echo(f"nothing was launched from '{folder}'", err=True)
    for row in rows:
        click.echo(
            f"{row['name']}  {row['target']} {row['job_id']}  {row['scheduler']} ({row['word']})  "
            f"run: {row['run_state'] or 'not started'}"
            + (f", step {row['step']} of {row['steps']}" if row["step"] else "")
            + (f"  {row['reason']}" if row["reason"] else "")
        )


def _row(found: "Submission") -> dict[str, object]:
    from shardwise.errors import ShardwiseError
    from shardwise.launch import submission
    from shardwise.launch.targets.parts import Seen

    try:
        seen: Seen = submission.look(found)
    except ShardwiseError as problem:  # the scheduler is not reachable from here; the run folder may be
        seen = Seen("unknown", problem.what)
    run = found.run
    status = run.read_status() if run else None
    start = next((e.model_dump() for e in run.events("start")), {}) if run else {}
    steps = run.steps() if run else []
    return {
        "name": found.name,
        "target": found.target,
        "job_id": found.job_id,
        "scheduler": seen.state,
        "word": seen.word,
        "run": found.run_path,
        "run_state": status.state if status else None,
        "reason": status.reason if status else "",
        "step": steps[-1].step if steps else 0,
        "steps": start.get("steps"),
        "loss": steps[-1].loss if steps else None,
    }


@click.command()
@click.argument("name")
@click.option(
    "--rank", type=click.IntRange(min=0), help="One rank's log; default: rank 0 and the scheduler's."
)
@click.option(
    "--lines", default=50, show_default=True, type=click.IntRange(min=1), help="How many last lines."
)
@FOLDER
def logs(name: str, rank: int | None, lines: int, folder: Path) -> None:
    """The last lines of a launched run's logs."""
    from shardwise.errors import UsageError
    from shardwise.launch import submission

    found = submission.find(name, folder)
    paths = submission.logs(found)
    if rank is None:
        wanted = [p for p in paths if not p.name.startswith("rank-") or p.name == "rank-0.log"]
    else:
        wanted = [p for p in paths if p.name == f"rank-{rank}.log"]
    if not wanted and rank is None and found.run is None and (text := submission.remote_log(found, lines)):
        click.echo(text, nl=False)
        return
    if not wanted:
        names = ", ".join(p.name for p in paths) or "none yet"
        raise UsageError(f"'{name}' has no such log", f"there are: {names}", f"look into {found.folder}")
    for path in wanted:
        click.echo(f"--- {path}")
        click.echo("\n".join(submission.tail(path, lines)))


@click.command()
@click.argument("name")
@click.option(
    "--now", is_flag=True, help="End it at once; what was trained since the last checkpoint is lost."
)
@FOLDER
def cancel(name: str, now: bool, folder: Path) -> None:
    """Ask a launched run to save and stop."""
    from shardwise.launch import submission

    found = submission.find(name, folder)
    submission.cancel(found, now)
    click.echo(f"{found.name}: asked to {'end at once' if now else 'save and stop'}", err=True)
