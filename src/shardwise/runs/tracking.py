"""The same events to the trackers people use: TensorBoard, Weights & Biases, MLflow, Trackio.

A tracker is a listener: what it does or fails to do never changes a run. One that fails is told once, as a warning
event, and left out from then on. The packages are imported when asked for.
"""

import importlib
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from shardwise.errors import MissingDependencyError, unknown_name
from shardwise.runs.records import Evaluation, Event, Sample, Step

PROJECT = "shardwise"  # the trackers' own variables (WANDB_PROJECT, MLFLOW_EXPERIMENT_NAME ...) go before it

_STEP_NUMBERS = (
    ("train/loss", "loss"),
    ("train/learning_rate", "learning_rate"),
    ("train/grad_norm", "grad_norm"),
    ("train/epoch", "epoch"),
    ("speed/tokens_per_second", "tokens_per_second"),
    ("memory/allocated_bytes", "allocated_bytes"),
    ("memory/peak_allocated_bytes", "peak_allocated_bytes"),
    ("memory/resident_bytes", "resident_bytes"),
)


class Tracker(Protocol):
    """One run in one tracker."""

    def numbers(self, step: int, values: Mapping[str, float]) -> None: ...

    def text(self, step: int, name: str, value: str) -> None: ...

    def close(self) -> None: ...


def numbers_of(event: Event) -> tuple[int, dict[str, float]] | None:
    """What of an event is a number over steps, by the names that trackers show."""
    if isinstance(event, Step):
        known = ((name, getattr(event, field)) for name, field in _STEP_NUMBERS)
        return event.step, {name: float(value) for name, value in known if value is not None}
    if isinstance(event, Evaluation):
        found = {"evaluation/loss": event.loss}
        if event.perplexity is not None:
            found["evaluation/perplexity"] = event.perplexity
        return event.step, found
    return None


def send(tracker: Tracker, event: Event) -> None:
    """One event to one tracker. Raises whatever the tracker's library raises."""
    found = numbers_of(event)
    if found is not None:
        tracker.numbers(*found)
    elif isinstance(event, Sample):
        tracker.text(event.step, "sample", f"{event.prompt}\n\n---\n\n{event.answer}")


def check(names: Sequence[str]) -> None:
    """Raise before a run starts: UnknownNameError for a name, MissingDependencyError for a package."""
    for name in names:
        if name not in TRACKERS:
            raise unknown_name("tracker", name, TRACKERS)
        package, _ = TRACKERS[name]
        _import(name, package)


def open_tracker(name: str, folder: Path, config: Mapping[str, Any]) -> Tracker:
    """A tracker for the run in `folder`; `config` is the resolved recipe. Raises as `check` does."""
    check((name,))
    package, make = TRACKERS[name]
    return make(_import(name, package), folder, config)


def _import(name: str, package: str) -> Any:
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as problem:
        raise MissingDependencyError(
            f"tracking with {name} needs the package '{problem.name}'",
            "it is not installed",
            f"pip install {_PIP[name]}, or take {name} out of run.tracking",
        ) from None


class TensorBoard:
    """Files in `folder`/tensorboard: `tensorboard --logdir runs` shows all runs."""

    def __init__(self, library: Any, folder: Path, config: Mapping[str, Any]) -> None:
        self._writer = library.Writer(str(folder / "tensorboard"))

    def numbers(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def text(self, step: int, name: str, value: str) -> None:
        """Its text panel needs TensorFlow's writer; samples stay in the run's own report."""

    def close(self) -> None:
        self._writer.close()


class _Logged:
    """Weights & Biases and Trackio: `init`, `log`, `finish` with the same meaning."""

    def __init__(self, library: Any, folder: Path, config: Mapping[str, Any], **more: Any) -> None:
        self._library = library
        variable = f"{library.__name__.upper()}_PROJECT"
        library.init(
            project=os.environ.get(variable) or PROJECT, name=folder.name, config=dict(config), **more
        )

    def numbers(self, step: int, values: Mapping[str, float]) -> None:
        self._library.log(dict(values), step=step)

    def text(self, step: int, name: str, value: str) -> None:
        """Texts are tables there, made anew with every row; samples stay in the run's own report."""

    def close(self) -> None:
        self._library.finish()


def _wandb(library: Any, folder: Path, config: Mapping[str, Any]) -> Tracker:
    return _Logged(library, folder, config, dir=str(folder))


class Mlflow:
    """Into MLFLOW_TRACKING_URI, or MLflow's own default."""

    def __init__(self, library: Any, folder: Path, config: Mapping[str, Any]) -> None:
        self._library = library
        library.set_experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME") or PROJECT)
        library.start_run(run_name=folder.name)
        library.log_dict(dict(config), "recipe.json")

    def numbers(self, step: int, values: Mapping[str, float]) -> None:
        self._library.log_metrics(dict(values), step=step)

    def text(self, step: int, name: str, value: str) -> None:
        self._library.log_text(value, f"{name}-{step:08d}.txt")

    def close(self) -> None:
        self._library.end_run()


# name in the recipe -> (module, what makes a tracker of it)
TRACKERS: dict[str, tuple[str, Callable[[Any, Path, Mapping[str, Any]], Tracker]]] = {
    "tensorboard": ("tensorboard.summary", TensorBoard),
    "wandb": ("wandb", _wandb),
    "mlflow": ("mlflow", Mlflow),
    "trackio": ("trackio", _Logged),
}
_PIP = {"tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow", "trackio": "trackio"}
