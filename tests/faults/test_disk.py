"""Disks that are full, fill up, or cannot be written; folders that are in use."""

import os
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from faulty import PATIENCE, Train, record

from shardwise.runs.checkpoints import verify

Mount = Callable[..., Path]


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Mount]:
    """Real file systems in memory."""
    made: list[Path] = []

    def make(name: str, options: str) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
        if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode:
            pytest.skip("file systems can only be mounted by root, outside of most containers")
        made.append(folder)
        return folder

    yield make
    for folder in made:
        subprocess.run(["umount", "-l", str(folder)], check=False)


def test_c03_a_disk_too_small_is_refused_before_the_run_with_both_numbers(train: Train, mount: Mount) -> None:
    folder = mount("small", "size=1m")
    ended = train("too-small", folder=folder)
    assert ended.code == 2, ended.text[-2000:]
    assert "a checkpoint, at most" in ended.text  # the plan says it
    assert re.search(r"the run needs 1\.\d+ MiB in '.*small', 1\.00 MiB are free", ended.text), ended.text
    assert list(folder.iterdir()) == []


def test_c03_a_disk_that_fills_up_during_the_run_keeps_the_older_checkpoint(
    train: Train, mount: Mount
) -> None:
    folder = mount("filling", "size=8m")
    ended = train("filling", "fill:0:6", folder=folder)
    assert ended.code == 74, ended.text[-2000:]
    assert (
        "checkpoint of step 8 could not be written" in ended.text
        and "older checkpoints are intact" in ended.text
    )
    assert "Traceback" not in ended.text
    status = ended.run.read_status()
    assert [c.step for c in ended.run.checkpoints()] == [4]
    assert verify(ended.run.checkpoint_path(4)) is None
    assert not list(ended.run.checkpoints_path.glob("*.writing"))
    (ended.run.path / "filler").unlink()
    assert status.state == "failed"
    again = train("filling", resume=True, folder=folder)
    assert again.code == 0 and "resumed from" in again.text, again.text[-2000:]


def test_a_read_only_folder_is_refused_within_5_seconds_before_the_model_is_read(
    train: Train, mount: Mount
) -> None:
    folder = mount("readonly", "ro,size=1m")
    began = time.monotonic()
    # a model that is not there: it would be the first thing to be complained about
    ended = train("readonly", folder=folder, settings=("model=/no/such/model",))
    seconds = time.monotonic() - began
    record("read-only", {"refused_after_seconds": seconds})
    assert ended.code == 2 and "nothing can be written" in ended.text, ended.text[-2000:]
    assert seconds < 5 * PATIENCE


def test_a_second_run_in_a_folder_is_refused_at_once_naming_the_first(train: Train) -> None:
    """By name for a new run, and for one that is resumed; before model or data are read."""
    going = train.start(
        "shared", settings=("training.max_steps=2000", "engine.name=single", "engine.processes=1")
    )
    try:
        going.after_step(1)
        first = f"process {going.process.pid} on "
        began = time.monotonic()
        new = train("shared", settings=("model=/no/such/model",))
        assert new.code == 2 and "run 'shared' exists already" in new.text and first in new.text, new.text
        resumed = train("shared", resume=True)
        assert resumed.code == 2 and "run 'shared' is in use" in resumed.text and first in resumed.text
        assert time.monotonic() - began < 8 * PATIENCE
    finally:
        going.process.terminate()
        assert going.end().code == 75
