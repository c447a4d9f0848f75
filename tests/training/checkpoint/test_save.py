"""A save that fails says why, leaves older checkpoints as they were, and publishes nothing half-written."""

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.errors import DiskFullError, DivergedError
from shardwise.runs import RunFolder
from shardwise.runs.checkpoints import choose, verify
from shardwise.training.checkpoint import save as module
from shardwise.training.checkpoint.load import load
from shardwise.training.checkpoint.save import save
from shardwise.training.engines.protocol import Ranks


class Toy:
    """As much of an engine as a save needs: 1 MiB of state."""

    def __init__(self, value: float = 1.0) -> None:
        self.ranks = Ranks()
        self.value = torch.full((2**18,), value)

    def state(self) -> dict[str, Any]:
        return {"weights": {"w": self.value}, "optimizer": {"w": {"step": 3}}}

    def load_state(self, state: dict[str, Any]) -> None:
        self.step = state["optimizer"]["w"]["step"]


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    run = RunFolder(tmp_path / "run")
    save(run, Toy(4.0), 4, {}, keep=1)  # type: ignore[arg-type]
    return run


def still_good(run: RunFolder) -> None:
    assert [p.name for p in run.checkpoints_path.iterdir()] == ["step-00000004"]
    engine = Toy(0.0)
    load(run.checkpoint_path(4), engine)  # type: ignore[arg-type]
    assert float(engine.value[-1]) == 4.0 and engine.step == 3


def test_c03_no_room_is_told_before_writing_with_both_numbers(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type("Usage", (), {"free": 100_000})()
    monkeypatch.setattr(module.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(DiskFullError) as caught:
        save(run, Toy(), 8, {}, keep=1)  # type: ignore[arg-type]
    assert caught.value.exit_code == 74
    assert "needs 1.00 MiB, 97.66 KiB are free" in caught.value.why
    still_good(run)


def test_c03_a_disk_that_fills_during_the_save_leaves_the_older_one(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def half(_: object, path: Path) -> None:
        path.write_bytes(b"0" * 1000)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(module, "save_file", half)
    with pytest.raises(DiskFullError, match="the disk is full"):
        save(run, Toy(), 8, {}, keep=1)  # type: ignore[arg-type]
    still_good(run)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 3 MB, really."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode != 0:
        pytest.skip("file systems can only be mounted by root, outside of most containers")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=False)


def test_c03_on_a_real_small_disk(small_disk: Path) -> None:
    run = RunFolder(small_disk / "run")
    save(run, Toy(4.0), 4, {}, keep=5)  # type: ignore[arg-type]
    save(run, Toy(6.0), 6, {}, keep=5)  # type: ignore[arg-type]
    with pytest.raises(DiskFullError):
        save(run, Toy(8.0), 8, {}, keep=5)  # type: ignore[arg-type]
    assert [c.step for c in run.checkpoints()] == [4, 6]
    assert all(verify(c.path) is None for c in run.checkpoints())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nothing_that_is_not_finite_is_ever_published(run: RunFolder, value: float) -> None:
    engine = Toy()
    engine.value[12345] = value
    with pytest.raises(DivergedError, match="weights w holds NaN or infinity"):
        save(run, engine, 8, {}, keep=1)  # type: ignore[arg-type]
    still_good(run)


_SAVER = """
import sys
from pathlib import Path
sys.path.insert(0, {here!r})
from test_save import Toy
from shardwise.runs import RunFolder
from shardwise.training.checkpoint.save import save
run = RunFolder(Path(sys.argv[1]))
print("ready", flush=True)
for step in range(max(c.step for c in run.checkpoints()) + 1, 100000):
    save(run, Toy(float(step)), step, {{}}, keep=2)
"""


def test_kill_9_in_the_middle_of_real_saves(run: RunFolder) -> None:
    """SHARDWISE_TEST_KILLS=50 makes it fifty; each costs an import of torch."""
    import random
    import time

    draw = random.Random(3)
    for _ in range(int(os.environ.get("SHARDWISE_TEST_KILLS", "2"))):
        program = _SAVER.format(here=str(Path(__file__).parent))
        process = subprocess.Popen([sys.executable, "-c", program, str(run.path)], stdout=subprocess.PIPE)
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        time.sleep(draw.uniform(0.0, 0.3))
        process.kill()
        process.wait()
        process.stdout.close()
        found = choose(run).checkpoint
        assert found is not None
        engine = Toy(0.0)
        load(found.path, engine)  # type: ignore[arg-type]
        assert torch.all(engine.value == float(found.step))
