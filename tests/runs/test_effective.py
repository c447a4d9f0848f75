"""Where a run's time went, with one interruption."""

from pathlib import Path

import pytest

from shardwise.runs import RunFolder
from shardwise.runs.effective import effective


def test_where_the_time_of_a_run_with_a_fault_and_a_stop_went(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    run.event("start", time=100.0, steps=4)
    for step in (1, 2, 3):
        run.event("step", time=100.0 + step, step=step, loss=1.0, seconds=0.9)
        if step == 2:
            run.event("checkpoint", time=102.5, step=2, seconds=0.5, written_seconds=0.7)
    # rank 1 died 0.6 s into step 4; its launcher noticed 0.1 s later and said so when all were gone
    run.event("fault", time=103.7, rank=1, reason="rank 1 was killed", silent_seconds=0.1)
    run.event("warning", time=105.0, message="rank 1 was killed; going on from step 2")
    run.event("resume", time=110.0, step=2)
    run.event("start", time=110.5, steps=4)
    run.event("step", time=112.0, step=3, loss=1.0, seconds=0.9)
    run.event("checkpoint", time=112.5, step=3, seconds=0.5)
    run.event("end", time=112.5, state="interrupted")
    run.event("resume", time=150.0, step=3)  # a person came back
    run.event("start", time=150.5, steps=4)
    run.event("warning", time=152.0, step=4, message="loss is nan", skipped=True)
    run.event("step", time=153.0, step=4, loss=1.0, seconds=0.9)
    found = effective(run)
    assert found.wall_seconds == 53.0
    assert found.step_seconds == pytest.approx(3.6)  # 4 steps that count
    assert (found.lost_steps, found.skipped_steps, found.starts) == (1, 1, 3)
    assert found.lost_seconds == pytest.approx(0.9 + 0.6)  # step 3, and what was done of step 4
    assert found.detection_seconds == pytest.approx(0.1)
    assert found.restart_seconds == pytest.approx(112.0 - 0.9 - 103.7)
    assert found.saving_seconds == 1.0
    assert found.away_seconds == 37.5
    assert found.share == pytest.approx(3.6 / 53)
    assert "1 steps lost (1.5 s), faults noticed in 0.1 s, started again in 7.4 s" in str(found)


def test_an_empty_run_has_no_share(tmp_path: Path) -> None:
    assert effective(RunFolder(tmp_path)).share == 0.0
