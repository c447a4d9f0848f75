"""A request to stop, whoever gets it: all ranks save the same step and end with 75."""

import os
import random
import signal
import time
from contextlib import suppress

import pytest
from faulty import PATIENCE, Train, record

from shardwise.runs.checkpoints import facts_of, verify
from shardwise.runs.records import Step

WHO = ("launcher", "one rank", "everyone")
COUNT = int(os.environ.get("SHARDWISE_TEST_STOPS", "4"))


@pytest.mark.parametrize("number", range(COUNT))
def test_sigterm_leaves_one_checkpoint_of_one_step_and_loses_nothing(train: Train, number: int) -> None:
    """To the launcher, to one rank, to all processes at once, each rank with a data worker's process beside it.

    SHARDWISE_TEST_STOPS=20 for twenty.
    """
    engine, who = ("fsdp2", "zero3")[number // 2 % 2], WHO[(number + number // 6) % 3]
    if engine == "zero3":
        pytest.importorskip("deepspeed")
    draw = random.Random(number)
    settings = ("training.max_steps=2000", "checkpoint.every_steps=1000")
    going = train.start(f"stop-{number}", "worker:0:0", engine=engine, settings=settings)
    going.after_step(draw.randint(2, 12))
    time.sleep(draw.uniform(0.0, 0.1))
    pids = {"launcher": [going.process.pid], "one rank": going.ranks()[number % 2 :][:1]}
    for pid in pids.get(who) or going.everyone():
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    began = time.monotonic()
    ended = going.end()
    seconds = time.monotonic() - began
    assert ended.code == 75, (who, ended.text[-2000:])
    status = ended.run.read_status()
    assert (status.state, status.exit_code) == ("interrupted", 75) and "stopped on request" in status.reason
    last = ended.run.history(Step)[-1].step
    assert [c.step for c in ended.run.checkpoints()] == [last]  # no step lost
    newest = ended.run.checkpoint_path(last)
    assert verify(newest) is None
    facts = facts_of(newest)
    assert (facts["step"], facts["world_size"]) == (last, 2)
    assert sorted(p.name for p in newest.glob("rank-*")) == ["rank-0.safetensors", "rank-1.safetensors"]
    assert [p.name for p in ended.run.checkpoints_path.iterdir()] == [newest.name]
    record(f"stop-{number:02d}", {"engine": engine, "sent_to": who, "step": last, "seconds": seconds})
    assert seconds < 20 * PATIENCE


def test_a_long_save_is_not_cut_short_by_a_stop(train: Train) -> None:
    """SHARDWISE_TEST_SAVE_SECONDS=35: longer than the 30 s that common launchers allow."""
    save_seconds = float(os.environ.get("SHARDWISE_TEST_SAVE_SECONDS", "4"))
    settings = ("training.max_steps=2000", "checkpoint.every_steps=1000")
    going = train.start("long-save", f"slow_save:0:{save_seconds}", settings=settings)
    going.after_step(3)
    os.kill(going.process.pid, signal.SIGTERM)
    began = time.monotonic()
    ended = going.end(save_seconds + 60)
    seconds = time.monotonic() - began
    assert ended.code == 75, ended.text[-2000:]
    assert seconds >= save_seconds
    last = ended.run.history(Step)[-1].step
    assert [c.step for c in ended.run.checkpoints()] == [last] and verify(
        ended.run.checkpoint_path(last)
    ) is None
    record("long-save", {"save_seconds": save_seconds, "ended_after_seconds": seconds})
