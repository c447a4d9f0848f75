"""How often a run saves, when the recipe leaves it open: little is lost by a failure, little time by saving."""

from math import ceil

from shardwise.estimate.memory.states import OPTIMIZER_STATES, counts_of
from shardwise.estimate.speed import constants as c
from shardwise.estimate.stack import Stack
from shardwise.facts.gpus import Gpu
from shardwise.facts.model import ModelShape

PER_RUN = 5
LONGEST_SECONDS = 30 * 60.0  # of training that a failure may cost
STALL_SHARE = (
    0.025  # of the time between two saves: half of what is promised, for disks are slower than their rates
)
FEWEST_STEPS = 10
# Bytes per second that one core copies, sums and hands to the system (benchmarks/save_stall.py: 1.5 GiB in 4.6 s).
WRITTEN_PER_SECOND = 0.35e9


def save_every(
    shape: ModelShape,
    stack: Stack,
    gpu: Gpu,
    step_seconds: float,
    steps: int | None,
    evaluate: int,
    background: bool,
) -> tuple[int, str]:
    """Steps between two saves, and why: a multiple of `evaluate` (not 0), so that the best one can be told.

    `background`: training waits only until each rank's share lies in host memory.
    """
    five = max(FEWEST_STEPS, (steps or 100 * PER_RUN) // PER_RUN)
    half_hour = max(1, int(LONGEST_SECONDS / step_seconds))
    cheap = ceil(stall_seconds(shape, stack, gpu, background) / (STALL_SHARE * step_seconds))
    chosen, why = min((five, "five times in a run"), (half_hour, "every half hour"))
    if cheap > chosen:
        chosen, why = cheap, f"more often, saving would take more than {STALL_SHARE:.1%} of the time"
    return ceil(chosen / evaluate) * evaluate if evaluate else chosen, why


def checkpoint_bytes(shape: ModelShape, stack: Stack) -> int:
    """Size of one checkpoint: trained weights in the precision the optimizer keeps, and its states."""
    low = stack.precision == "bf16" and not stack.master_weights
    states = OPTIMIZER_STATES[stack.optimizer] * (0.5 if low and stack.optimizer == "adamw" else 1.0)
    return int(counts_of(shape, stack).trained * ((2 if low else 4) + states))


def stall_seconds(shape: ModelShape, stack: Stack, gpu: Gpu, background: bool) -> float:
    """Seconds that training stands still for a save."""
    mine = (
        checkpoint_bytes(shape, stack) / stack.world_size
    )  # each rank writes its share, also where all hold the same
    if background:
        return mine / (gpu.pcie.bytes_per_second * c.PCIE)
    node = mine * min(stack.gpus_per_node, stack.world_size)
    return mine / WRITTEN_PER_SECOND + node / gpu.disk_write_bytes_per_second
