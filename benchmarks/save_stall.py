"""How long training stands still for a checkpoint: `python benchmarks/save_stall.py MODEL_FOLDER`.

Real runs through the command a person types: full fine-tuning of a model, saved every few steps, once with training
waiting for the save and once with the save in the background. Printed: seconds of a step, seconds that training stood
still for a save, seconds until the save was whole on the disk, the interval that `checkpoint.every_steps: auto` means
in a run of 1,000 such steps, and the share of its wall time that standing still takes. Writes JSON with --out.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path
from typing import Any

from shardwise.data.standard_library import write_pairs
from shardwise.launch.job import decide
from shardwise.recipe import Recipe, load_recipe
from shardwise.runs import RunFolder
from shardwise.runs.records import Checkpoint

INTERVAL = 6  # steps between the saves that are measured
RECIPE = """
model: {model}
data: {{train: {train}, validation: 0, sequence_length: {tokens}}}
method: full
optimizer: {{learning_rate: 1e-5}}
training: {{max_steps: {steps}, global_batch_size: 1, micro_batch_size: 1, precision: fp32}}
engine: {{name: single, device: cpu, processes: 1}}
evaluation: {{every_steps: 0}}
checkpoint: {{every_steps: {interval}, keep: 1, background: {background}}}
run: {{folder: {folder}, name: {name}}}
"""


def measure(model: Path, root: Path, background: bool, saves: int, tokens: int) -> dict[str, Any]:
    """One run. Its last save always waits and is left out."""
    train, _ = write_pairs(root, train_rows=800, validation_rows=4)
    name = "background" if background else "waiting"
    recipe = root / f"{name}.yaml"
    values = {
        "model": model,
        "train": train,
        "steps": INTERVAL * saves + 4,
        "interval": INTERVAL,
        "tokens": tokens,
    }
    recipe.write_text(
        RECIPE.format(**values, background=str(background).lower(), folder=root / "runs", name=name)
    )
    command = [sys.executable, "-m", "shardwise.cli.main", "train", str(recipe), "--anyway"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    run = RunFolder(root / "runs" / name)
    steps = [e.seconds or 0.0 for e in run.steps()][2:]  # the first two are watched
    interval = default_interval(recipe)
    found = [e for e in run.events() if isinstance(e, Checkpoint)][:-1]
    step, stalled = statistics.median(steps), statistics.median(e.seconds or 0.0 for e in found)
    summary = run.summary()
    assert summary is not None
    return {
        "bytes": found[0].bytes,
        "saves": len(found),
        "step_seconds_median": step,
        "step_seconds_mean": statistics.mean(steps),
        "stalled_seconds_median": stalled,
        "written_seconds_median": statistics.median(e.written_seconds or 0.0 for e in found),
        "default_interval_steps": interval,
        "stalled_share": stalled / (stalled + interval * step),
        "effective": summary.model_dump()["effective"],
    }


def default_interval(recipe: Path) -> int:
    """Steps between two saves where the recipe leaves it open and the run is long."""
    values = load_recipe(recipe).model_dump(mode="json")
    values["checkpoint"]["every_steps"] = "auto"
    values["training"]["max_steps"] = 1000
    found = decide(Recipe.model_validate(values)).recipe.checkpoint.every_steps
    assert isinstance(found, int)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--saves", type=int, default=2)
    parser.add_argument(
        "--tokens", type=int, default=512, help="of a step: the shorter, the larger the share"
    )
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="save-stall-") as root:
        result = {
            "kind": "save_stall",
            "date": date.today().isoformat(),
            "platform": platform.platform(),
            "cores": os.cpu_count(),
            "measured_interval_steps": INTERVAL,
            "tokens_per_step": given.tokens,
            "waiting": measure(
                given.model, Path(root), background=False, saves=given.saves, tokens=given.tokens
            ),
            "background": measure(
                given.model, Path(root), background=True, saves=given.saves, tokens=given.tokens
            ),
        }
    print(json.dumps(result, indent=1))
    if given.out:
        given.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
