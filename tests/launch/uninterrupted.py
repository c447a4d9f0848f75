"""The same recipe on this machine alone, never interrupted: what a launched run must equal."""

import sys
from pathlib import Path

from shardwise.launch.local import start
from shardwise.runs import RunFolder


def losses(run: RunFolder) -> list[tuple[int, float]]:
    return [(s.step, s.loss) for s in run.steps()]


def losses_of_whole_run(run: RunFolder, folder: Path) -> list[tuple[int, float]]:
    """Two ranks of this machine run the recipe that `run` has resolved."""
    whole = RunFolder(folder)
    whole.logs_path.mkdir(parents=True)
    whole.recipe_path.write_text(run.recipe_text())
    whole.status("running")
    training = [sys.executable, "-m", "shardwise.training.main", str(whole.path)]
    assert start(training, 2, whole.logs_path, {"DS_ACCELERATOR": "cpu"}).exit_code == 0
    return losses(whole)
