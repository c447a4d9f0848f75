"""What is shown while a run trains."""

import time

import pytest

from shardwise.training.progress import Bar


def test_the_time_left_counts_from_the_first_step(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An evaluation before it takes long and is not repeated with every step."""
    now = [100.0]
    bar = Bar(10, 0, shown=True)
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    now[0] += 60
    bar.begin()
    now[0] += 2
    bar.step(1, 1.5, 10.0, None)
    now[0] += 18
    bar.step(10, 1.25, 10.0, 2**20)
    monkeypatch.undo()
    bar.close()
    first, last = capsys.readouterr().err.splitlines()
    assert first == "step 1/10  loss 1.500  10 tok/s  left 18.0 s"
    assert last == "step 10/10  loss 1.250  10 tok/s  peak 1.00 MiB  left 0.0 s"
