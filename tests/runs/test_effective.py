"""Where a run's time went, with one interruption."""

from pathlib import Path

import pytest

from shardwise.runs import RunFolder
from shardwise.runs.effective import effective


def test_lost_steps_saving_and_absence_are_told_apart(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    run.event("start", time=100.0, steps=4)
    for step in (1, 2, 3):
        run.event("step", time=100.0 + step, step=step, loss=1.0, seconds=0.9)
        if step == 2:
            run.event("checkpoint", time=102.5, step=2, seconds=0.5)
    run.event("warning", time=104.0, message="rank 1 was killed")
    run.event("resume", time=110.0, step=2)
    run.event("start", time=110.5, steps=4)
    run.event("step", time=112.0, step=3, loss=1.0, seconds=0.9)
    run.event("step", time=113.0, step=4, loss=1.0, seconds=0.9)
    run.event("checkpoint", time=114.0, step=4, seconds=0.5)
    found = effective(run)
    assert found.wall_seconds == 14.0
    assert found.step_seconds == pytest.approx(3.6)  # 4 steps that count
    assert (found.lost_steps, found.lost_seconds) == (1, 0.9)
    assert found.saving_seconds == 1.0
    assert found.away_seconds == 7.0  # from the last step to the resume
    assert found.starts == 2
    assert found.share == pytest.approx(3.6 / 14)
    assert "1 steps lost" in str(found)


def test_an_empty_run_has_no_share(tmp_path: Path) -> None:
    assert effective(RunFolder(tmp_path)).share == 0.0
