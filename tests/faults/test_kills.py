"""kill -9, of a rank, of the launcher, in the middle of saves and of the export."""

import os
import signal
import time

import pytest
from faulty import PATIENCE, Ended, Train, alive, record, same

from shardwise.runs.checkpoints import verify
from shardwise.runs.records import Checkpoint, Fault, Resume, Step, Warned


def test_kill_9_of_a_rank_is_noticed_and_the_run_ends_with_the_very_same_weights(
    train: Train, engine: str, undisturbed: Ended
) -> None:
    """Noticed within 2 s, training again within 15 s, at most one save interval (4 steps) lost."""
    rank = {"fsdp2": 1, "zero3": 0}[engine]
    ended = train(f"killed-{engine}", f"kill:{rank}:7", engine=engine)
    assert ended.code == 0, ended.text[-2000:]
    fault = next(e for e in ended.run.events() if isinstance(e, Fault))
    assert fault.rank == rank and "killed by SIGKILL" in fault.reason
    struck = ended.struck_unix_seconds
    assert struck is not None
    again = next(e for e in ended.run.events() if isinstance(e, Step) and e.time > fault.time)
    numbers = {"noticed_seconds": fault.time - struck, "trained_again_seconds": again.time - struck}
    record(f"kill-rank-{engine}", numbers)
    assert numbers["noticed_seconds"] < 2 * PATIENCE, numbers
    assert numbers["trained_again_seconds"] < 15 * PATIENCE, numbers
    assert [e.step for e in ended.run.events() if isinstance(e, Resume)] == [4]
    assert ended.losses == undisturbed.losses
    assert same(ended.weights(), undisturbed.weights())
    assert "effective training time" in ended.text and "2 steps lost" in " ".join(ended.text.split())


def test_c02_kill_9_at_random_moments_of_saves(train: Train, engine: str, undisturbed: Ended) -> None:
    """Every restart finds a whole checkpoint by itself. SHARDWISE_TEST_KILLS=50 makes it fifty in one run."""
    kills = int(os.environ.get("SHARDWISE_TEST_KILLS", "1"))
    steps = 12 if kills == 1 else 4 * kills + 12
    settings = ("checkpoint.every_steps=1", "checkpoint.restarts=3", f"training.max_steps={steps}")
    settings += ("checkpoint.background=true",) if engine == "zero3" else ()
    ended = train(
        f"torn-{engine}", f"kills:0:{kills}", engine=engine, settings=settings, timeout=30 * kills + 120
    )
    assert ended.code == 0, ended.text[-2000:]
    faults = [e for e in ended.run.events() if isinstance(e, Fault)]
    assert len(faults) == kills
    assert [s.step for s in ended.run.history(Step)] == list(range(1, steps + 1))
    published: dict[str, int] = {}
    for event in ended.run.events():
        if isinstance(event, Checkpoint):
            published[str(event.path)] = published.get(str(event.path), 0) + 1
    resumed = [e.step for e in ended.run.events() if isinstance(e, Resume)]
    interrupted = sum("still being written" in e.message for e in ended.run.events() if isinstance(e, Warned))
    record(
        f"kills-in-saves-{engine}", {"kills": kills, "resumed_from_steps": resumed, "torn_saves": interrupted}
    )
    assert interrupted or kills < 20  # else hardly any kill can have struck a save
    assert all(verify(c.path) is None for c in ended.run.checkpoints())
    if steps == 12:
        assert ended.losses == undisturbed.losses and same(ended.weights(), undisturbed.weights())


def test_c06_kill_9_of_a_rank_during_the_export_publishes_nothing_by_halves(
    train: Train, undisturbed: Ended, engine: str
) -> None:
    if engine == "fsdp2":
        pytest.skip("stage 3 gathers the weights during the export; one engine is enough")
    ended = train("export", "kill:1:12:export", engine=engine)
    assert ended.code == 0, ended.text[-2000:]
    assert [e.step for e in ended.run.events() if isinstance(e, Resume)] == [12]
    weights = ended.weights()
    assert all(t.numel() > 0 for t in weights.values()) and same(weights, undisturbed.weights())
    assert not list(ended.run.path.glob("*.writing"))


def test_kill_9_of_the_launcher_leaves_no_worker_and_a_lock_that_is_taken_over(
    train: Train, engine: str
) -> None:
    if engine == "zero3":
        pytest.skip("what binds ranks to their launcher knows no engine")
    going = train.start("orphans", engine=engine, settings=("training.max_steps=400",))
    going.after_step(5)
    pids = [pid for pid in going.everyone() if pid != going.process.pid]
    assert len(pids) == 2
    os.kill(going.process.pid, signal.SIGKILL)
    began = time.monotonic()
    going.process.wait()
    while any(map(alive, pids)) and time.monotonic() - began < 20:
        time.sleep(0.02)
    seconds = time.monotonic() - began
    record("kill-launcher", {"last_worker_gone_seconds": seconds})
    assert seconds < 5
    assert (
        going.run.read_status().state == "failed" and "ended without a word" in going.run.read_status().reason
    )
    again = train("orphans", resume=True, settings=("training.max_steps=8", "training.max_steps"))
    assert again.code == 0, again.text[-2000:]
    assert "training.max_steps was 400, is 8 (accepted)" in again.text
    assert going.run.read_status().state == "done"
