"""`shardwise chat`: talk to what a run made."""

import subprocess
import sys

import click


@click.command()
@click.argument("run")
@click.option("--folder", default="runs", show_default=True, help="Where run folders are.")
@click.option("--message", "-m", help="Ask this once, print the answer, and end.")
@click.option("--max-new-tokens", default=256, show_default=True, help="Length limit of an answer.")
@click.option("--base", is_flag=True, help="The untrained base instead, for comparison.")
def chat(run: str, folder: str, message: str | None, max_new_tokens: int, base: bool) -> None:
    """Talk to the model of RUN (a name, a path, or 'latest')."""
    from shardwise.errors import UsageError
    from shardwise.runs import open_run

    found = open_run(run, folder)
    if found.result_path is None and not base:
        raise UsageError(
            f"run '{found.name}' has no trained model yet",
            f"its state is {found.state}",
            f"finish it with: shardwise train --resume {found.path}",
        )
    command = [sys.executable, "-m", "shardwise.training.chat", str(found.path), str(max_new_tokens)]
    command += ["--base"] if base else []
    command += ["--message", message] if message is not None else []
    sys.exit(subprocess.run(command, check=False).returncode)
