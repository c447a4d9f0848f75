"""Thinning a long course without losing what matters in it."""

import math
from collections.abc import Iterable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.report.series import series, thin
from shardwise.runs import Course, RunFolder, Step


def course_of(steps: Iterable[Step]) -> Course:
    made = Course(RunFolder(Path("none")))
    for step in steps:
        made._add(step.model_dump())
    return made


def test_short_courses_are_kept_whole() -> None:
    found = series(course_of([Step(step=i, loss=1.0) for i in range(1000)]))
    assert len(found.step) == found.steps_total == 1000


def test_spikes_survive_thinning() -> None:
    steps = [
        Step(step=i, loss=9.0 if i == 77_777 else 2.0, grad_norm=0.01 if i == 5 else 1.0)
        for i in range(100_000)
    ]
    found = series(course_of(steps), 1000)
    assert found.steps_total == 100_000 and len(found.step) <= 1000
    assert max(v for v in found.loss if v is not None) == 9.0
    assert min(v for v in found.grad_norm if v is not None) == 0.01
    assert (found.step[0], found.step[-1]) == (0, 99_999)


def test_nan_is_a_gap_and_does_not_hide_the_rest() -> None:
    steps = [Step(step=i, loss=math.nan if i % 2 else float(i)) for i in range(4000)]
    found = series(course_of(steps), 400)
    assert None in found.loss
    assert max(v for v in found.loss if v is not None) == 3998.0


def test_rate_is_derived_from_tokens_and_seconds() -> None:
    assert series(course_of([Step(step=1, loss=1.0, tokens=100, seconds=0.5)])).tokens_per_second == (200.0,)
    assert series(course_of([Step(step=1, loss=1.0)])).tokens_per_second == (None,)


@given(
    st.lists(st.floats(-1e6, 1e6) | st.just(math.nan), min_size=1, max_size=400),
    st.integers(min_value=8, max_value=60),
)
def test_thinned_curve_has_the_envelope_of_the_whole(values: list[float], most: int) -> None:
    kept = thin([values], len(values), most)
    assert kept == sorted(set(kept)) and kept[0] == 0 and kept[-1] == len(values) - 1
    assert len(kept) <= most or len(values) <= most
    known = [v for v in values if v == v]
    shown = [values[i] for i in kept if values[i] == values[i]]
    if known:
        assert (min(known), max(known)) == (min(shown), max(shown))


def test_limit_is_kept_for_many_columns() -> None:
    columns = [[math.sin(i * (c + 1)) for i in range(5000)] for c in range(3)]
    assert len(thin(columns, 5000, 100)) <= 100
    assert thin(columns, 5000, 100)[-1] == pytest.approx(4999)
