"""Trackers hear what the events say, and nothing they do changes a run."""

import sys
import types
from pathlib import Path
from typing import Any

import pytest

from shardwise.errors import MissingDependencyError, UnknownNameError
from shardwise.runs import RunFolder, Sample, create_run, tracking

CONFIG = {"model": {"source": "tiny"}}


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return create_run(tmp_path, "one", "model: tiny\ndata: x\n", {})


class Heard:
    """Stands for a tracker's package and keeps the calls, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        module = types.ModuleType(name)
        module.__getattr__ = self._take  # type: ignore[method-assign]
        monkeypatch.setitem(sys.modules, name, module)

    def _take(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def call(*arguments: Any, **named: Any) -> "Heard":
            self.calls.append((name, arguments, named))
            return self

        return call

    def __getattr__(self, name: str) -> Any:
        return self._take(name)

    def named(self, name: str) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        return [(a, n) for called, a, n in self.calls if called == name]


def live(run: RunFolder) -> None:
    run.event("start", steps=2)
    run.event("evaluation", step=0, loss=3.0, perplexity=20.0)
    run.event("step", step=1, loss=2.5, learning_rate=1e-4)
    run.event("sample", step=2, prompt="why?", answer="because")
    run.release()


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_wandb_and_trackio_get_numbers_by_step(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.delenv(f"{name.upper()}_PROJECT", raising=False)
    heard = Heard(monkeypatch, name)
    run.track([name], CONFIG)
    live(run)
    (_, init) = heard.named("init")[0]
    assert (init["project"], init["name"], init["config"]) == ("shardwise", "one", CONFIG)
    assert heard.named("log") == [
        (({"evaluation/loss": 3.0, "evaluation/perplexity": 20.0},), {"step": 0}),
        (({"train/loss": 2.5, "train/learning_rate": 1e-4},), {"step": 1}),
    ]
    assert len(heard.named("finish")) == 1


def test_mlflow_gets_numbers_samples_and_the_recipe(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    heard = Heard(monkeypatch, "mlflow")
    run.track(["mlflow"], CONFIG)
    live(run)
    assert heard.named("log_dict") == [((CONFIG, "recipe.json"), {})]
    assert heard.named("log_metrics")[1] == (({"train/loss": 2.5, "train/learning_rate": 1e-4},), {"step": 1})
    assert heard.named("log_text") == [(("why?\n\n---\n\nbecause", "sample-00000002.txt"), {})]
    assert [name for name, _, _ in heard.calls][-1] == "end_run"


def test_tensorboard_gets_scalars_beside_the_run(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", types.ModuleType("tensorboard"))
    heard = Heard(monkeypatch, "tensorboard.summary")
    run.track(["tensorboard"], CONFIG)
    live(run)
    assert heard.named("Writer") == [((str(run.path / "tensorboard"),), {})]
    assert (("train/loss", 2.5, 1), {}) in heard.named("add_scalar")
    assert heard.calls[-1][0] == "close"


def test_a_failing_tracker_is_told_once_and_the_run_goes_on(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard = Heard(monkeypatch, "trackio")
    run.track(["trackio"], CONFIG)
    sys.modules["trackio"].log = lambda *a, **k: 1 / 0  # type: ignore[attr-defined]
    live(run)
    kinds = [e.kind for e in run.events()]
    assert kinds == ["start", "evaluation", "warning", "step", "sample"]
    warning = next(run.events("warning"))
    assert "trackio is not told any more: ZeroDivisionError" in warning.model_dump()["message"]
    assert heard.named("finish") == []


def test_a_tracker_that_cannot_begin_is_a_warning_not_an_end(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    Heard(monkeypatch, "wandb")
    sys.modules["wandb"].init = lambda **k: 1 / 0  # type: ignore[attr-defined]
    run.track(["wandb"], CONFIG)
    live(run)
    assert next(e.kind for e in run.events()) == "warning"


def test_unknown_and_missing_trackers_are_refused_before_anything_starts(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UnknownNameError, match="tensorbord") as caught:
        run.track(["tensorbord"], CONFIG)
    assert "tensorboard" in caught.value.hint
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(MissingDependencyError, match="mlflow") as missing:
        tracking.check(["mlflow"])
    assert "pip install mlflow" in missing.value.hint
    assert not run.events_path.exists()


def test_what_is_no_number_is_not_sent_as_one() -> None:
    assert tracking.numbers_of(Sample(step=1, prompt="p", answer="a")) is None
