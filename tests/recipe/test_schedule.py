"""Learning rates: a function of the optimizer step alone, reaching the planned end at the last step."""

import pytest

from shardwise.recipe.schedule import learning_rate, warmup_steps
from shardwise.recipe.schema import Schedule


def rates(steps: int, **keys: object) -> list[float]:
    schedule = Schedule(**keys)  # type: ignore[arg-type]
    return [learning_rate(schedule, 1.0, i, steps) for i in range(steps)]


def test_l07_linear_decay_over_twelve_updates_ends_at_the_planned_value() -> None:
    assert rates(12, name="linear", warmup=0) == pytest.approx([1 - (i + 1) / 12 for i in range(12)])


@pytest.mark.parametrize("name", ["linear", "cosine"])
@pytest.mark.parametrize("steps", [1, 2, 7, 40])
def test_d25_last_step_has_exactly_the_final_rate(name: str, steps: int) -> None:
    assert rates(steps, name=name, warmup=0, final_ratio=0.1)[-1] == pytest.approx(0.1)


def test_warmup_rises_to_the_peak_and_decay_follows() -> None:
    found = rates(20, name="cosine", warmup=4)
    assert found[:4] == pytest.approx([0.25, 0.5, 0.75, 1.0])
    assert found[3:] == sorted(found[3:], reverse=True)


@pytest.mark.parametrize(("warmup", "steps"), [(0, 0), (0.1, 2), (1, 1), (1.0, 20), (3, 3)])
def test_l15_warmup_as_count_and_as_share(warmup: float, steps: int) -> None:
    assert warmup_steps(Schedule(warmup=warmup), 20) == steps


def test_constant_stays() -> None:
    assert rates(5, name="constant", warmup=0) == [1.0] * 5
