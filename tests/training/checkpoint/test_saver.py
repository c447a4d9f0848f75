"""Saves in the background: what training may change meanwhile, when they are published, how they fail."""

import errno
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from test_save import Toy

from shardwise.errors import DiskFullError
from shardwise.runs import RunFolder
from shardwise.runs.checkpoints import verify
from shardwise.runs.records import Checkpoint, Warned
from shardwise.training.checkpoint import save as module
from shardwise.training.checkpoint.load import load
from shardwise.training.checkpoint.saver import Saver


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Writing waits for it."""
    opened = threading.Event()
    before = module._write

    def write(*arguments: Any) -> Any:
        assert opened.wait(20)
        return before(*arguments)

    monkeypatch.setattr(module, "_write", write)
    return opened


def saver(tmp_path: Path, engine: Toy, background: bool = True) -> Saver:
    return Saver(RunFolder(tmp_path / "run"), engine, 2, background)  # type: ignore[arg-type]


def test_training_goes_on_while_a_copy_is_written_and_the_marker_comes_last(
    tmp_path: Path, gate: threading.Event, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = Toy(4.0)
    mine = saver(tmp_path, engine)
    mine.save(4, {"evaluation_loss": 1.0})
    engine.value.fill_(5.0)  # the next step
    assert not mine.ended and mine.run.checkpoints() == []
    assert "from a copy of 1.00 MiB in host memory per rank" in capsys.readouterr().err
    gate.set()
    mine._writing.thread.join()  # type: ignore[union-attr]
    assert mine.ended and mine.run.checkpoints() == []  # written, and not published before all ranks say so
    mine.collect()
    assert not mine.ended and [c.step for c in mine.run.checkpoints()] == [4]
    again = Toy(0.0)
    load(mine.run.checkpoint_path(4), again)  # type: ignore[arg-type]
    assert torch.all(again.value == 4.0)
    event = next(e for e in mine.run.events() if isinstance(e, Checkpoint))
    assert event.seconds is not None and event.written_seconds is not None
    assert event.seconds < event.written_seconds


def test_a_save_that_waits_ends_the_one_before_it_first(tmp_path: Path, gate: threading.Event) -> None:
    mine = saver(tmp_path, Toy(4.0))
    mine.save(4, {})
    threading.Timer(0.2, gate.set).start()
    mine.save(6, {}, wait=True)
    assert [c.step for c in mine.run.checkpoints()] == [4, 6]
    assert all(verify(c.path) is None for c in mine.run.checkpoints())


def test_a_write_that_fails_is_told_afterwards_and_leaves_the_older_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = saver(tmp_path, Toy(4.0))
    mine.save(4, {}, wait=True)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(module, "save_file", full)
    mine.save(8, {})
    with pytest.raises(DiskFullError, match="checkpoint of step 8 could not be written"):
        mine.collect()
    assert [p.name for p in mine.run.checkpoints_path.iterdir()] == ["step-00000004"]
    mine.collect()  # told once


def test_without_memory_for_a_copy_training_waits_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type("Memory", (), {"available": 2**21 - 1})()
    monkeypatch.setattr(module.psutil, "virtual_memory", lambda: usage)
    mine = saver(tmp_path, Toy(4.0))
    mine.save(4, {})
    assert [c.step for c in mine.run.checkpoints()] == [4]
    assert any("no host memory is free" in e.message for e in mine.run.events() if isinstance(e, Warned))
