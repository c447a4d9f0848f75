"""A checkpoint is used only when every byte is as it was written; the best and the latest are never deleted."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shardwise.errors import CheckpointError
from shardwise.runs import RunFolder
from shardwise.runs.checkpoints import INDEX, STATE, choose, chosen, prune, publish, set_aside, verify


def make(run: RunFolder, step: int, loss: float | None = None, size: int = 4096) -> Path:
    """A published checkpoint with two rank files of random bytes."""
    work = run.checkpoint_path(step).with_suffix(".writing")
    work.mkdir(parents=True)
    for rank in (0, 1):
        (work / f"rank-{rank}.safetensors").write_bytes(random.Random(10 * step + rank).randbytes(size))
    (work / INDEX).write_text("{}")
    (work / STATE).write_text(json.dumps({"step": step, "evaluation_loss": loss}))
    publish(work, run.checkpoint_path(step), {})
    return run.checkpoint_path(step)


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path / "run")


def damage(folder: Path, number: int) -> str:
    """One of a hundred ways to harm a checkpoint. Returns the name of the file it happened to."""
    draw = random.Random(number)
    name = draw.choice(sorted(p.name for p in folder.iterdir()))
    path = folder / name
    kind = ("flip", "truncate", "delete", "empty", "swap")[number % 5]
    if kind == "swap":
        a, b = folder / "rank-0.safetensors", folder / "rank-1.safetensors"
        a.rename(folder / "x")
        b.rename(a)
        (folder / "x").rename(b)
        return "rank-"
    data = bytearray(path.read_bytes())
    if kind == "flip":
        at = draw.randrange(len(data))
        data[at] ^= 1 << draw.randrange(8)
    if kind == "truncate":
        del data[draw.randrange(len(data)) :]
    if kind == "delete":
        path.unlink()
    else:
        path.write_bytes(b"" if kind == "empty" else data)
    return name


def test_a_hundred_damages_are_all_found_and_the_earlier_checkpoint_is_used(run: RunFolder) -> None:
    make(run, 4)
    whole = make(run, 8)
    kept = shutil.copytree(whole, run.path / "kept")
    for number in range(100):
        name = damage(whole, number)
        problem = verify(whole)
        assert problem is not None, (number, name)
        # a marker that differs is told by the file it vouches for
        assert name in problem or name == "complete", (number, name, problem)
        choice = choose(run)
        assert choice.checkpoint is not None and choice.checkpoint.step == 4
        assert [s.path.name for s in choice.skipped] == ["step-00000008"]
        shutil.rmtree(whole)
        shutil.copytree(kept, whole)
    assert verify(whole) is None


def test_c02_an_interrupted_save_is_named_and_the_one_before_is_used(run: RunFolder) -> None:
    make(run, 4)
    work = run.checkpoint_path(8).with_name("step-00000008.writing")
    work.mkdir()
    (work / "rank-0.safetensors").write_bytes(b"half")
    checkpoint, skipped = chosen(run)
    assert checkpoint.step == 4
    assert skipped[0].path == work and "being written" in skipped[0].reason


def test_no_good_checkpoint_is_an_error_that_names_each_file(run: RunFolder) -> None:
    for step in (4, 8):
        (make(run, step) / "rank-1.safetensors").unlink()
    with pytest.raises(CheckpointError) as caught:
        chosen(run)
    assert caught.value.why.count("rank-1.safetensors is missing") == 2


def test_a_manifest_cannot_point_outside_its_folder(run: RunFolder) -> None:
    """Verification reads only what lies in the folder, also when somebody else wrote the manifest."""
    import hashlib

    folder = make(run, 4)
    found = json.loads((folder / "manifest.json").read_text())
    found["files"]["../../secret"] = {"bytes": 1, "sha256": "0"}
    text = json.dumps(found)
    (folder / "manifest.json").write_text(text)
    (folder / "complete").write_text(hashlib.sha256(text.encode()).hexdigest())
    assert "outside the folder" in (verify(folder) or "")


def test_c04_best_and_latest_stay_whatever_keep_says(run: RunFolder) -> None:
    removed: list[int] = []
    for number, step in enumerate(range(2, 14, 2)):
        make(run, step, loss=1.0 + number)  # rising from the start: the first is the best
        removed += prune(run, keep=1)
        assert {2, step} <= {c.step for c in run.checkpoints()}
    assert [c.step for c in run.checkpoints()] == [2, 12]
    assert removed == [4, 6, 8, 10]


def test_rotation_goes_by_step_not_by_modification_time(run: RunFolder) -> None:
    for step in (2, 4, 6):
        os.utime(make(run, step), (1e9 - step, 1e9 - step))  # copied, or the clock moved
    assert prune(run, keep=1) == [2, 4]


def test_a_published_checkpoint_is_never_written_over(run: RunFolder) -> None:
    first = make(run, 4)
    before = {p.name: p.stat().st_ino for p in first.iterdir()}
    make(run, 4)
    assert {p.name: p.stat().st_ino for p in first.iterdir()} == before
    (first / INDEX).write_text("damaged")
    make(run, 4)
    assert verify(first) is None
    assert first.with_name("step-00000004.damaged").is_dir()


def test_one_set_aside_is_no_checkpoint_and_goes_when_a_newer_one_is_good(run: RunFolder) -> None:
    make(run, 4)
    set_aside(make(run, 8))
    assert [c.step for c in run.checkpoints()] == [4]
    make(run, 8)
    prune(run, keep=1)
    assert sorted(p.name for p in run.checkpoints_path.iterdir()) == ["step-00000008"]


_SAVER = """
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from test_checkpoints import make
from shardwise.runs import RunFolder
from shardwise.runs.checkpoints import prune
run = RunFolder(Path(sys.argv[1]))
start = max((c.step for c in run.checkpoints()), default=0)
print("ready", flush=True)
for step in range(start + 1, start + 10000):
    import shutil
    shutil.rmtree(run.checkpoint_path(step).with_suffix(".writing"), ignore_errors=True)
    make(run, step, size=200_000)
    prune(run, 2)
"""


def test_kill_9_at_any_moment_of_saving_leaves_a_whole_checkpoint(run: RunFolder) -> None:
    make(run, 1)
    draw = random.Random(7)
    program = _SAVER.format(tests=str(Path(__file__).parent))
    for _ in range(int(os.environ.get("SHARDWISE_TEST_KILLS", "5"))):
        newest = choose(run).checkpoint
        assert newest is not None
        process = subprocess.Popen([sys.executable, "-c", program, str(run.path)], stdout=subprocess.PIPE)
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        time.sleep(draw.uniform(0.0, 0.05))
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        after = choose(run).checkpoint
        assert after is not None and after.step >= newest.step
        assert all(verify(c.path) is None for c in run.checkpoints())


@pytest.mark.skipif(
    not {"sha_ni", "sha2"} & set(Path("/proc/cpuinfo").read_text().split())
    if Path("/proc/cpuinfo").exists()
    else True,
    reason="the rate is for processors with SHA instructions",
)
def test_verification_runs_at_one_gigabyte_a_second_and_core(run: RunFolder) -> None:
    folder = make(run, 4, size=50_000_000)
    rates = []
    for _ in range(5):
        began = time.process_time()  # of all threads together: work of other processes does not count
        assert verify(folder) is None
        rates.append(0.1e9 / (time.process_time() - began))
    assert max(rates) > 1e9
