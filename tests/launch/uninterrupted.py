"""One small recipe for every way to start ranks, and what it does on this machine alone, never interrupted."""

import subprocess
import sys
from pathlib import Path

from shardwise.runs import RunFolder

STEPS = 250  # some seconds: enough to be killed or pre-empted in the middle
RECIPE = """
model: {model}
data: {{train: {data}, validation: 0, sequence_length: 128}}
method: full
engine: {{name: fsdp2, processes: {processes}}}
training: {{max_steps: {steps}, global_batch_size: 4, micro_batch_size: 1, precision: fp32}}
optimizer: {{learning_rate: 1e-2}}
checkpoint: {{every_steps: {every}}}
"""


def recipe(model: Path, data: Path, every: int, launch: str, processes: str = "auto") -> str:
    """Its text; `launch` is the section of that name, in braces."""
    text = RECIPE.format(model=model, data=data, every=every, steps=STEPS, processes=processes)
    return f"{text}launch: {launch}\n"


def losses(run: RunFolder) -> list[tuple[int, float]]:
    return [(s.step, s.loss) for s in run.steps()]


def losses_of_whole_run(model: Path, data: Path, folder: Path) -> list[tuple[int, float]]:
    """Two ranks of this machine, from the first step to the last."""
    (folder / "r.yaml").write_text(recipe(model, data, 0, "{}", processes="2"))
    command = [sys.executable, "-m", "shardwise.cli.main", "train", str(folder / "r.yaml"), "--set",
               f"run.folder={folder}", "--set", "run.name=whole", "--set", "engine.device=cpu"]  # fmt: skip
    done = subprocess.run(command, text=True, capture_output=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    return losses(RunFolder(folder / "whole"))
