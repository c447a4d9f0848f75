"""A step that is not finite can be left out, or gone back behind; not more often than the recipe allows."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from shardwise.runs import RunFolder
from shardwise.runs.records import Step, Warned
from shardwise.training.main import main
from shardwise.training.model import LossModel

Made = Callable[..., RunFolder]


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes the loss of the n-th micro-batches of a run (counted from 0; 4 a step) infinite, whenever they come."""
    before = LossModel.forward

    def at(*numbers: int) -> None:
        seen: list[torch.Tensor] = []
        bad: list[torch.Tensor] = []

        def forward(self: LossModel, batch: object) -> torch.Tensor:
            loss = before(self, batch)  # type: ignore[arg-type]
            if not self.training:
                return loss
            ids = batch.input_ids  # type: ignore[attr-defined]
            if len(seen) in numbers:
                bad.append(ids)
            seen.append(ids)
            # a finite gradient: only the loss says that something is wrong
            return loss + float("inf") if any(torch.equal(ids, b) for b in bad) else loss

        monkeypatch.setattr(LossModel, "forward", forward)

    return at


def anew(made: RunFolder, target: Path, **training: object) -> RunFolder:
    """The recipe of a run, to be run again with other settings."""
    target.mkdir()
    text = made.recipe_text()
    for key, value in training.items():
        old = next(line for line in text.splitlines() if line.strip().startswith(f"{key}:"))
        text = text.replace(old, f"  {key}: {value}")
    (target / "recipe.yaml").write_text(text)
    return RunFolder(target)


def test_skip_and_rollback_leave_the_step_out_and_end_alike(
    small_run: Made, tmp_path: Path, poison: Callable[..., None]
) -> None:
    """24 rows make 5 bins an epoch in steps of 4 and 1: the 13th micro-batch is in step 5."""
    ended = {}
    for choice in ("skip", "rollback"):
        run = anew(small_run("full"), tmp_path / choice, non_finite=choice)
        poison(13)
        assert main([str(run.path)]) == 0
        steps = [s.step for s in run.history(Step)]
        bad = next(n for n in range(1, 7) if n not in steps)
        assert steps == [n for n in range(1, 7) if n != bad] and bad > 3
        told = [
            e.message for e in run.events() if isinstance(e, Warned) and "its update is left out" in e.message
        ]
        assert len(told) == 1 and f"step {bad}: loss is inf (rank 0, rows " in told[0]
        assert ("back to the checkpoint of step 3" in told[0]) == (choice == "rollback")
        summary = run.summary()
        assert summary is not None and summary.model_dump()["skipped_steps"] == [bad]
        assert summary.model_dump()["effective"]["lost_steps"] == (bad - 4 if choice == "rollback" else 0)
        ended[choice] = load_file(run.model_path / "model.safetensors")
    assert all(torch.equal(ended["skip"][k], ended["rollback"][k]) for k in ended["skip"])
    assert all(torch.isfinite(v).all() for v in ended["skip"].values())


def test_more_than_the_limit_stops_the_run_with_its_checkpoint_intact(
    small_run: Made, tmp_path: Path, poison: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    run = anew(small_run("full"), tmp_path / "run", non_finite="skip", non_finite_limit=1)
    poison(10, 15, 17)
    assert main([str(run.path)]) == 1
    assert "training.non_finite_limit is 1" in capsys.readouterr().err
    assert [c.step for c in run.checkpoints()] == [3]
    assert not run.model_path.exists()
    shutil.rmtree(run.path)


def test_rollback_without_a_checkpoint_stops(
    small_run: Made, tmp_path: Path, poison: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    run = anew(small_run("full"), tmp_path / "run", non_finite="rollback")
    poison(1)
    assert main([str(run.path)]) == 1
    told = capsys.readouterr().err
    assert "step 1: loss is inf (rank 0, rows " in told and "no checkpoint yet to go back to" in told
