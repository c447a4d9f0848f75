"""`shardwise train`: run a recipe."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from shardwise.data import DataReport
    from shardwise.launch.ahead import Ahead
    from shardwise.launch.job import Job
    from shardwise.recipe import Recipe
    from shardwise.runs import RunFolder


@click.command()
@click.argument("recipe_path", metavar="RECIPE.yaml", required=False, type=click.Path(path_type=Path))
@click.option(
    "--set", "settings", multiple=True, metavar="KEY=VALUE", help="Change one key, e.g. --set lora.rank=8."
)
@click.option("--dry-run", is_flag=True, help="Check and plan everything, print it, start nothing.")
@click.option(
    "--resume", metavar="RUN", help="Continue this run (name, path or 'latest') from its newest checkpoint."
)
@click.option(
    "--accept",
    "accepted",
    multiple=True,
    metavar="FIELD",
    help="With --resume: go on although FIELD has changed since the checkpoint, e.g. versions.torch.",
)
@click.option("--anyway", is_flag=True, help="Start even if the plan says that it does not fit.")
@click.option("--folder", default="runs", show_default=True, help="Where --resume looks for run folders.")
def train(
    recipe_path: Path | None,
    settings: tuple[str, ...],
    dry_run: bool,
    anyway: bool,
    resume: str | None,
    accepted: tuple[str, ...],
    folder: str,
) -> None:
    """Run RECIPE.yaml on this machine: plan, train, measure, report.

    A run that is resumed goes on from its newest good checkpoint, also with --set on other ranks or under
    another engine. Exit codes: 0 done, 1 failed, 2 refused, 74 disk full, 75 stopped with its state saved.
    """
    from shardwise.launch.ahead import Ahead
    from shardwise.launch.space import require_writable
    from shardwise.recipe import load_recipe, parse_recipe
    from shardwise.runs import open_run
    from shardwise.runs.create import refuse_taken

    if (recipe_path is None) == (resume is None):
        raise click.UsageError("give either a RECIPE.yaml or --resume RUN")
    run = None
    if resume is not None:
        run = open_run(resume, folder)
        run.refuse_if_held()
        if not run.checkpoints():
            raise click.UsageError(f"run '{run.name}' has no complete checkpoint to resume from")
        require_writable(run.path)
        recipe = parse_recipe(run.recipe_text(), str(run.recipe_path), settings)
    else:
        assert recipe_path is not None
        if accepted:
            raise click.UsageError("--accept goes with --resume")
        recipe = load_recipe(recipe_path, settings)
        require_writable(Path(recipe.run.folder))
        refuse_taken(recipe.run.folder, recipe.run.name)
    if dry_run:
        decide_and_show(recipe)
        click.echo("dry run: nothing was started")
        return
    with Ahead(recipe) as ahead:
        job = decide_and_show(recipe)
        if job.plan.verdict == "does not fit" and not anyway:
            raise does_not_fit(job)
        run_and_report(job, run, accepted, ahead)


def decide_and_show(recipe: "Recipe") -> "Job":
    """Prepare and plan a recipe, and print rows and plan."""
    from rich.console import Console

    from shardwise.launch.job import decide
    from shardwise.launch.space import require_space, space
    from shardwise.report.decided import decided_text

    errors = Console(stderr=True, highlight=False)
    with errors.status("reading the model and preparing rows ...") as status:

        def progress(what: str, done: int, total: int | None) -> None:
            status.update(f"{what}: {done:,}" + (f" of {total:,}" if total else ""))

        job = decide(recipe, progress)
    console = Console(highlight=False)
    console.print(data_line(job.prepared.report))
    console.print(decided_text(job.plan))
    console.print(f"disk  {space(job, Path(recipe.run.folder))}")
    require_space(job, Path(recipe.run.folder))
    return job


def run_and_report(
    job: "Job",
    run: "RunFolder | None" = None,
    accepted: tuple[str, ...] = (),
    ahead: "Ahead | None" = None,
) -> "RunFolder":
    """Start the ranks; at the end print estimate against measurement and write report.html."""
    from rich.console import Console

    from shardwise.launch.job import execute
    from shardwise.report.decided import decided_json
    from shardwise.report.run_html import run_html
    from shardwise.report.run_text import print_run
    from shardwise.report.run_view import view_run
    from shardwise.runs.jsonfile import write_text

    done = execute(job, decided_json(job.plan), run, accepted, ahead)
    write_text(done.report_path, run_html(view_run(done)))
    print_run(Console(highlight=False), view_run(done))  # read again: now the report is one of its files
    return done


def does_not_fit(job: "Job") -> Exception:
    """Why this run is not started, with what would make it smaller."""
    from shardwise.errors import RuleError
    from shardwise.units import format_bytes

    plan = job.plan
    levers = []
    if plan.stack.micro_batch_size > 1:
        levers.append("training.micro_batch_size=1")
    if plan.stack.activation_checkpointing != "full":
        levers.append("training.activation_checkpointing=full")
    if plan.stack.method == "full":
        levers.append("method=lora")
    return RuleError(
        f"the plan does not fit: {format_bytes(plan.needed_bytes)} of {format_bytes(plan.capacity_bytes)} per device",
        "the run would end for want of memory, after it had cost time",
        (f"try --set {' --set '.join(levers)}; " if levers else "")
        + "shardwise plan shows what fits, --anyway starts it all the same",
    )


def data_line(report: "DataReport") -> str:
    """Rows read = used + refused + dropped, in one line, and what to look at when some were not used."""
    text = (
        f"{report.rows_read:,} rows read: {report.rows_train:,} to train, {report.rows_validation:,} held out, "
        f"{report.rows_refused:,} refused, {report.rows_dropped:,} dropped\n"
        f"      {report.trained_tokens:,} of {report.tokens:,} tokens carry a label; {report.ended:,} rows end with "
        "an end token"
    )
    text = "data  " + (f"{report.streamed}\n      " if report.streamed else "") + text
    if report.passed_over:
        text += f"\n      not read: {', '.join(report.passed_over[:4])}"
        text += f" and {len(report.passed_over) - 4} more" if len(report.passed_over) > 4 else ""
    findings = [f"{f.count:,} x {f.reason}" for f in (*report.refused, *report.dropped)]
    return "\n      ".join([text, *findings, *(["see where with: shardwise data check"] if findings else [])])
