"""What the keys of `schedule` mean: the learning rate of every optimizer step."""

import math

from shardwise.recipe.schema import Schedule


def warmup_steps(schedule: Schedule, steps: int) -> int:
    """An integer counts steps; a number with a decimal point is a share of all steps, rounded up."""
    if isinstance(schedule.warmup, int):
        return min(schedule.warmup, steps)
    return min(math.ceil(schedule.warmup * steps), steps)


def learning_rate(schedule: Schedule, peak: float, step: int, steps: int) -> float:
    """Learning rate of optimizer step `step` (from 0) of `steps`.

    Rises linearly to `peak` over the warmup steps, then follows the schedule; the last step has exactly
    `final_ratio * peak` (`constant` stays at the peak). Depends on optimizer steps only, never on ranks or
    micro-batches.
    """
    warmup = warmup_steps(schedule, steps)
    if step < warmup:
        return peak * (step + 1) / warmup
    if schedule.name == "constant" or steps == warmup:
        return peak
    progress = (step - warmup + 1) / (steps - warmup)
    falling = 1 - progress if schedule.name == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return peak * (schedule.final_ratio + (1 - schedule.final_ratio) * falling)
