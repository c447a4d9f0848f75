"""How often a run saves by itself."""

from dataclasses import replace

import pytest

from shardwise.estimate.stack import Stack
from shardwise.facts.catalogue import named_shape
from shardwise.facts.gpus import find_gpu
from shardwise.plan.saving import LONGEST_SECONDS, STALL_SHARE, save_every, stall_seconds

SHAPE = named_shape("meta-llama/Llama-3.1-8B")
FULL = Stack(method="full", sharding="fsdp2", world_size=8, gpus_per_node=8)
H100 = find_gpu("H100-80GB")


def test_a_run_saves_five_times_but_at_least_every_half_hour() -> None:
    lora = Stack(method="lora")
    assert save_every(SHAPE, lora, H100, 1.0, 1000, 0, True) == (200, "five times in a run")
    assert save_every(SHAPE, lora, H100, 1.0, 12, 0, True)[0] == 10  # not after every other step
    days, why = save_every(SHAPE, lora, H100, 2.0, 10**6, 0, True)
    assert days == LONGEST_SECONDS / 2 and why == "every half hour"


def test_what_waits_for_the_disk_is_saved_less_often() -> None:
    waiting = stall_seconds(SHAPE, FULL, H100, background=False)
    copying = stall_seconds(SHAPE, FULL, H100, background=True)
    assert waiting > 12 * SHAPE.total_parameters / H100.disk_write_bytes_per_second > 10 * copying
    steps, why = save_every(SHAPE, FULL, H100, 1.0, 100, 0, background=False)
    assert waiting / steps <= STALL_SHARE < waiting / (steps - 1) and "more than 2.5% of the time" in why
    slow = replace(H100, disk_write_bytes_per_second=H100.disk_write_bytes_per_second / 10)
    assert save_every(SHAPE, FULL, slow, 1.0, 100, 0, background=False)[0] > 2 * steps


@pytest.mark.parametrize("evaluate", [7, 30, 450])
def test_saves_meet_evaluations_so_that_the_best_can_be_told(evaluate: int) -> None:
    steps, _ = save_every(SHAPE, FULL, H100, 5.0, 1000, evaluate, background=True)
    assert steps % evaluate == 0 and 0 <= steps - 200 < evaluate
