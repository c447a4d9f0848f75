"""Before a run on a processor: have its matrix rates measured, once per machine and torch."""

import json
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version

from shardwise.facts.machine import Machine, detect_machine
from shardwise.facts.precision import MatrixRates, load_rates, save_rates
from shardwise.recipe import Recipe

LIMIT_SECONDS = 60.0  # importing torch on a cold disk


class Probe:
    """A measurement that runs while rows are prepared; `collect` before the precision is decided."""

    def __init__(self, recipe: Recipe) -> None:
        self._running: subprocess.Popen[str] | None = None
        if not to_be_measured(recipe, detect_machine()):
            return
        self._running = subprocess.Popen(
            [sys.executable, "-m", "shardwise.training.probe"],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def collect(self) -> None:
        """Keep what was measured. Without torch, or when it fails, the processor's flags decide."""
        if self._running is None:
            return
        try:
            out, _ = self._running.communicate(timeout=LIMIT_SECONDS)
            save_rates(MatrixRates(**json.loads(out.strip().splitlines()[-1])))
        except subprocess.TimeoutExpired:
            self.stop()
        except (ValueError, TypeError, IndexError):
            return

    def stop(self) -> None:
        """End a measurement nobody waits for any more."""
        if self._running is not None and self._running.poll() is None:
            self._running.kill()
            self._running.communicate()


def to_be_measured(recipe: Recipe, machine: Machine) -> bool:
    """Whether the precision of this recipe's run depends on rates of this processor that nobody has measured."""
    on_cpu = recipe.engine.device == "cpu" or (recipe.engine.device == "auto" and machine.device == "cpu")
    return recipe.training.precision == "auto" and on_cpu and not _known(machine.threads)


def _known(threads: int) -> bool:
    try:
        return load_rates(threads, version("torch")) is not None
    except PackageNotFoundError:
        return True  # nothing to measure with
