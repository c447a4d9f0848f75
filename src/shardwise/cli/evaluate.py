"""`shardwise eval`: the held-out loss of what a run trained."""

import subprocess
import sys

import click


@click.command("eval")
@click.argument("name", metavar="RUN")
@click.option("--data", metavar="FILE", help="Other rows than the run's held-out ones.")
@click.option(
    "--batch-size",
    type=click.IntRange(min=1),
    default=8,
    show_default=True,
    help="Rows at a time: changes time and memory, never the number.",
)
@click.option("--checkpoint", metavar="STEP", help="A step, best or last; default: the run's result.")
@click.option("--base", is_flag=True, help="The base model instead, to compare with.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
@click.option("--folder", default="runs", show_default=True, help="Where run folders are.")
def evaluate(
    name: str,
    data: str | None,
    batch_size: int,
    checkpoint: str | None,
    base: bool,
    as_json: bool,
    folder: str,
) -> None:
    """Loss and perplexity per trained token of RUN's model, the same for every batch size."""
    from shardwise.runs import open_run

    run = open_run(name, folder)
    command = [sys.executable, "-m", "shardwise.training.evaluation", str(run.path)]
    command += ["--batch-size", str(batch_size)]
    for flag, value in (("--data", data), ("--checkpoint", checkpoint)):
        command += [flag, value] if value else []
    command += [flag for flag, given in (("--base", base), ("--json", as_json)) if given]
    code = subprocess.run(command, check=False).returncode
    if code:
        sys.exit(code if code > 0 else 1)
