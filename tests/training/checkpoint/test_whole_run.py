"""A rank that is told to resume, as torchrun and schedulers start it: it verifies and compares by itself."""

import errno
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from shardwise.runs import RunFolder
from shardwise.runs.checkpoints import choose
from shardwise.runs.records import Resume, Step, Warned
from shardwise.training.main import main

Made = Callable[..., RunFolder]


def copy(run: RunFolder, target: Path) -> RunFolder:
    return RunFolder(Path(shutil.copytree(run.path, target)))


def test_a_damaged_checkpoint_is_passed_over_and_the_run_ends_with_the_same_weights(
    small_run: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = small_run("full")
    run = copy(whole, tmp_path / "run")
    losses = [e.loss for e in run.history(Step)]
    file = run.checkpoint_path(6) / "rank-0.safetensors"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    shutil.rmtree(run.model_path)
    assert main([str(run.path), "--resume"]) == 0
    assert "step-00000006 is not used: the content of rank-0.safetensors" in capsys.readouterr().err
    assert [e.step for e in run.events() if isinstance(e, Resume)] == [3]
    assert [e.loss for e in run.history(Step)] == losses
    a, b = (load_file(r.model_path / "model.safetensors") for r in (whole, run))
    assert all(torch.equal(a[k], b[k]) for k in a)
    assert run.checkpoint_path(6).with_name("step-00000006.damaged").exists() is False


def test_a_rank_refuses_what_changed_by_itself(
    small_run: Made,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = copy(small_run("full"), tmp_path / "run")
    text = run.recipe_text()
    assert "learning_rate: 0.01" in text
    run.recipe_path.write_text(text.replace("learning_rate: 0.01", "learning_rate: 0.02"))
    assert main([str(run.path), "--resume"]) == 2
    assert "optimizer.learning_rate was 0.01, is 0.02" in capsys.readouterr().err
    monkeypatch.setenv("SHARDWISE_ACCEPT", "versions.torch, optimizer.learning_rate")  # one has not changed
    assert main([str(run.path), "--resume"]) == 0
    assert "is 0.02 (accepted)" in [e for e in run.events() if isinstance(e, Warned)][-1].message


def test_c03_a_disk_that_has_no_room_for_an_event_ends_the_run_as_a_full_disk(
    small_run: Made,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Exit code 74, told in three lines, the checkpoint as it was."""
    run = copy(small_run("full"), tmp_path / "run")
    shutil.rmtree(run.checkpoint_path(6))
    before = RunFolder.event

    def event(self: RunFolder, kind: str, **fields: object) -> None:
        if kind == "step":
            raise OSError(errno.ENOSPC, "No space left on device")
        before(self, kind, **fields)

    monkeypatch.setattr(RunFolder, "event", event)
    assert main([str(run.path), "--resume"]) == 74
    told = capsys.readouterr().err
    assert "the disk is full" in told and "checkpoints are intact" in told and "Traceback" not in told
    assert choose(run).checkpoint == run.checkpoints()[0] and run.checkpoints()[0].step == 3


def test_c08_what_cannot_be_saved_at_the_end_is_found_before_the_first_step(
    small_run: Made,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from transformers import PreTrainedModel

    def refused(*_: object, **__: object) -> None:
        raise ValueError("tensors share memory")

    run = copy(small_run("full"), tmp_path / "run")
    shutil.rmtree(run.checkpoints_path)
    monkeypatch.setattr(PreTrainedModel, "save_pretrained", refused)
    steps = len(list(run.events("step")))
    assert main([str(run.path)]) == 1
    told = capsys.readouterr().err
    assert "could not be saved at its end" in told and "tensors share memory" in told
    assert len(list(run.events("step"))) == steps and not (run.path / ".rehearsal").exists()
