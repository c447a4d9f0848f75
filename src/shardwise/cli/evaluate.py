"""`shardwise eval`: the held-out loss of what a run trained, or its results on public tasks."""

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
@click.option(
    "--processes",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Ranks that share the rows, each with the whole model: changes time, never the number.",
)
@click.option("--checkpoint", metavar="STEP", help="A step, best or last; default: the run's result.")
@click.option("--base", is_flag=True, help="The base model instead, to compare with.")
@click.option(
    "--tasks", metavar="NAMES", help="Tasks of lm-evaluation-harness instead, such as hellaswag,arc_easy."
)
@click.option("--limit", type=click.IntRange(min=1), help="With --tasks: examples per task.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
@click.option("--folder", default="runs", show_default=True, help="Where run folders are.")
def evaluate(
    name: str,
    data: str | None,
    batch_size: int,
    processes: int,
    checkpoint: str | None,
    base: bool,
    tasks: str | None,
    limit: int | None,
    as_json: bool,
    folder: str,
) -> None:
    """Loss and perplexity per trained token of RUN's model, the same for every batch size and number of ranks."""
    from shardwise.runs import open_run

    if limit is not None and tasks is None:
        raise click.UsageError("--limit goes with --tasks")
    if tasks is not None and (processes > 1 or data is not None):
        raise click.UsageError(
            "--tasks brings its own rows and runs in one process: leave --data and --processes out"
        )
    run = open_run(name, folder)
    command = [sys.executable, "-m", "shardwise.training.evaluation", str(run.path)]
    command += ["--batch-size", str(batch_size)]
    options = (("--data", data), ("--checkpoint", checkpoint), ("--tasks", tasks), ("--limit", limit))
    for flag, value in options:
        command += [flag, str(value)] if value else []
    command += [flag for flag, given in (("--base", base), ("--json", as_json)) if given]
    code = _on_ranks(command, processes) if processes > 1 else subprocess.run(command, check=False).returncode
    if code:
        sys.exit(code if code > 0 else 1)


def _on_ranks(command: list[str], processes: int) -> int:
    """Several ranks of this machine; what rank 0 writes is the answer."""
    import tempfile
    from pathlib import Path

    from shardwise.launch import start

    with tempfile.TemporaryDirectory(prefix="shardwise-eval-") as logs:
        outcome = start(command, processes, Path(logs), output=sys.stdout.buffer)
        if outcome.failure is not None and outcome.failure.rank != 0:
            click.echo("\n".join(outcome.failure.tail), err=True)
        return outcome.exit_code
