"""On a CPU few steps are followed storage by storage: those that hold the run's peak."""

from collections.abc import Callable

from shardwise.runs import RunFolder
from shardwise.training.meter import SOON, heaviest


def test_the_heaviest_step_is_followed() -> None:
    assert heaviest(0, [5]) == {0}
    assert heaviest(10, [1, 2, 3]) == {12}
    assert heaviest(0, [1] * 500) == {1}, "states are there from the second step on"


def test_where_the_first_step_is_the_heaviest_another_one_with_states_is_followed_too() -> None:
    assert heaviest(0, [9, 4, 7, 7, 3]) == {0, 2}
    assert heaviest(0, [9, 4]) == {0, 1}


def test_a_heaviest_step_that_is_far_off_is_not_waited_for() -> None:
    sizes = [1] * 100
    sizes[SOON + 1] = 2
    assert heaviest(0, sizes) == {1, SOON + 1}
    sizes[SOON] = 3
    assert heaviest(0, sizes) == {SOON}


def test_a_run_follows_the_step_that_holds_its_peak(small_run: Callable[[str], RunFolder]) -> None:
    """Of steps as heavy as the first, one with optimizer states in its backward pass."""
    run = small_run("lora")
    summary = run.summary()
    assert summary is not None
    measured = summary.model_dump()["measured"]
    assert measured["method"].endswith("during 1 step")
    steps = [e.model_dump() for e in run.events("step")]
    peaks = [e["peak_allocated_bytes"] for e in steps]
    assert peaks == sorted(peaks) and peaks[-1] == measured["peak_allocated_bytes"] > peaks[0]
    assert peaks[0] == steps[0]["allocated_bytes"], "nothing more is known yet"
