"""`shardwise export`: hand over what a run trained."""

import subprocess
import sys
from pathlib import Path

import click


@click.command()
@click.argument("name", metavar="RUN")
@click.option(
    "--to",
    "kind",
    required=True,
    type=click.Choice(["adapter", "merged", "gguf", "full"]),
    help="adapter: PEFT's format. merged: one model, the adapter merged into the 16-bit base. gguf: one file for "
    "llama.cpp. full: the model of a run that trained all weights.",
)
@click.option("--output", type=click.Path(path_type=Path), help="Folder to make; default RUN/export/KIND.")
@click.option(
    "--type",
    "number_type",
    type=click.Choice(["f16", "q8_0", "bf16", "fp32"]),
    help="gguf: f16 (default) or q8_0; merged: bf16 (default) or fp32; full: the run's own, bf16 or fp32.",
)
@click.option("--checkpoint", metavar="STEP", help="A step, best or last; default: the run's result.")
@click.option("--folder", default="runs", show_default=True, help="Where run folders are.")
def export(
    name: str, kind: str, output: Path | None, number_type: str | None, checkpoint: str | None, folder: str
) -> None:
    """Write RUN's weights in a format that others load, read them back, and compare with the trained model."""
    from shardwise.errors import UsageError
    from shardwise.runs import open_run

    run = open_run(name, folder)
    label = (
        f"{kind}-{number_type or 'f16'}"
        if kind == "gguf"
        else f"{kind}-{number_type}"
        if number_type
        else kind
    )
    target = output or run.path / "export" / label
    if target.exists():
        raise UsageError(
            f"'{target}' exists already",
            "an export never writes over anything",
            "give another place with --output",
        )
    command = [sys.executable, "-m", "shardwise.training.export.main", str(run.path), "--to", kind]
    command += ["--output", str(target), *(["--type", number_type] if number_type else [])]
    command += ["--checkpoint", checkpoint] if checkpoint else []
    code = subprocess.run(command, check=False).returncode
    if code:
        sys.exit(code if code > 0 else 1)
