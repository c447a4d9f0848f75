"""The fastest stack of one engine that fits, found without looking at every candidate.

Recomputing fewer layers comes before more: none, then as many layers as the memory asks for, then every layer with
its attention kept (selective), then every layer whole. Of the candidates of an engine (checkpointing x micro-batch)
most are decided by bounds:

- more sequences at once never make a token slower, and recomputation never makes it faster;
- more sequences never need less memory while gradients are accumulated;
- no engine needs less than its states and what one device holds at the peak of the forward pass without any.

So few estimates of memory are made, each of which plays a step. The answer is that of all candidates one by one; a
test compares the two.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache, partial
from math import inf, lcm
from typing import Any

from shardwise.estimate.memory.fixed import fixed_bytes
from shardwise.estimate.memory.formula import NARROW, estimate_memory
from shardwise.estimate.memory.states import held
from shardwise.estimate.memory.terms import MemoryEstimate
from shardwise.estimate.memory.trainer import OURS
from shardwise.estimate.speed import step_seconds
from shardwise.estimate.stack import Checkpointing, Stack
from shardwise.facts.gpus import Offer
from shardwise.facts.model import ModelShape
from shardwise.plan.model import disk_holds, host_holds, verdict
from shardwise.plan.recomputation import first_below, least_layers, none_too_many

_FIELDS = [f.name for f in fields(Stack)]
_MICRO, _ACCUMULATION, _KIND = (
    _FIELDS.index(name)
    for name in ("micro_batch_size", "gradient_accumulation_steps", "activation_checkpointing")
)
EQUAL = 0.98  # a stack replaces a simpler one only when it takes less than this share of its time


class Grid:
    """The candidates of one engine: `kinds` of checkpointing x `micros`, each stack and its memory made when asked.
    Where all kinds are, so is the least number of layers that fits.

    Nothing here depends on the GPU beyond what the base stack says of it, so one grid serves every card.
    `alone`: the grid of one device without an engine (None: this is it).
    """

    __slots__ = (
        *("alone", "base", "kinds", "micros", "per_rank", "shape"),
        *("_least", "_memory", "_saved", "_stacks", "_static", "_values"),
    )

    def __init__(
        self,
        shape: ModelShape,
        base: Stack,
        per_rank: int,
        kinds: Sequence[Checkpointing],
        micros: Sequence[int],
        alone: "Grid | None" = None,
    ) -> None:
        self.shape, self.base, self.per_rank, self.alone = shape, base, per_rank, alone
        self.kinds, self.micros = tuple(kinds), tuple(m for m in micros if per_rank % m == 0)
        self._values: list[Any] = [getattr(base, name) for name in _FIELDS]
        self._stacks: dict[tuple[Checkpointing, int], Stack] = {}
        self._memory: dict[tuple[Checkpointing, int], MemoryEstimate] = {}
        self._static: dict[bool, int] = {}
        self._least: dict[tuple[Checkpointing, int], int] = {}
        self._saved: int | None = None

    def __len__(self) -> int:
        return (len(self.kinds) + self.partial) * len(self.micros)

    @property
    def partial(self) -> bool:
        """Whether a number of layers may be recomputed: nothing else was asked for."""
        return len(self.kinds) > 1 and self.shape.num_hidden_layers > 1

    def stack(self, kind: Checkpointing, micro: int) -> Stack:
        found = self._stacks.get((kind, micro))
        if found is None:
            values = self._values.copy()  # dataclasses.replace takes four times as long
            values[_MICRO], values[_ACCUMULATION], values[_KIND] = micro, self.per_rank // micro, kind
            found = self._stacks[kind, micro] = Stack(*values)
        return found

    def memory(self, kind: Checkpointing, micro: int) -> MemoryEstimate:
        found = self._memory.get((kind, micro))
        if found is None:
            found = self._memory[kind, micro] = estimate_memory(self.shape, self.stack(kind, micro))
        return found

    def at_least(self, kind: Checkpointing, micro: int) -> int:
        """A lower bound of what one device needs: its states, and what the forward pass holds on one device.

        The latter is the larger of lines in the number of sequences, so the line through the two smallest
        micro-batches stays below it for larger ones.
        """
        found = self._least.get((kind, micro))
        if found is None:
            found = self._least[kind, micro] = self._at_least(kind, micro)
        return found

    def _at_least(self, kind: Checkpointing, micro: int) -> int:
        if self.alone is None:
            return self.memory(kind, micro).needed_bytes
        alone, (first, *others) = self.alone, self.alone.micros
        forward = alone.forward_bytes(kind, first)
        if others:
            slope = (alone.forward_bytes(kind, others[0]) - forward) / (others[0] - first)
            forward += int(slope * (micro - first))
        return self.static_bytes(kind, micro) + forward + fixed_bytes(self.base)

    def high_bytes(self, micro: int, layers: int) -> int:
        """What one device may need at most with so many layers recomputed: `verdict` says fits when it is there."""
        return self.memory(layers or "none", micro).most_needed_bytes

    def layers_at_least(self, micro: int, capacity: int, exact: bool = False) -> int | None:
        """A lower bound of how many layers must be recomputed; None: no number of them is enough.

        By what one device without an engine needs; exact: by the first piece of the need itself, which is known once
        for all cards.
        """
        most = self.shape.num_hidden_layers - 1
        if exact:
            memory, limit, first = self.memory(1, micro), capacity, self.high_bytes(micro, 1)
            if self.base.sharding == "zero3":  # what it gathers ahead depends on which layers are recomputed
                second = self.high_bytes(micro, min(2, most))
            else:
                second = first - int(self.saved_bytes(micro) * memory.high_bytes / memory.allocated_bytes)
        else:
            fixed = fixed_bytes(self.base)
            limit = fixed + int((capacity - fixed) / (1 + NARROW))  # the narrowest range around an estimate
            first, second = self.at_least(1, micro), self.at_least(min(2, most), micro)
        if first <= limit:
            return 1
        count = 1 + first_below(first, first - second, limit) if first > second else most + 1
        return count if count <= most else None

    def saved_bytes(self, micro: int) -> int:
        """What one more recomputed layer takes off the forward pass, and off no other moment more: by the token."""
        if self.alone is not None:
            return self.alone.saved_bytes(micro)
        least = self.micros[0]
        if self._saved is None:
            first, second = (
                self.forward_bytes(k, least) for k in (1, min(2, self.shape.num_hidden_layers - 1))
            )
            self._saved = first - second
        return self._saved * micro // least

    def forward_bytes(self, kind: Checkpointing, micro: int) -> int:
        """What lives at the peak of the forward pass beyond the states."""
        return self.memory(kind, micro).phases["forward"] - self.static_bytes(kind, micro)

    def static_bytes(self, kind: Checkpointing, micro: int) -> int:
        """What a device holds between steps; it depends on whether gradients are accumulated, on nothing else."""
        accumulates = micro < self.per_rank
        found = self._static.get(accumulates)
        if found is None:
            h = held(self.shape, self.stack(kind, micro), OURS)
            found = self._static[accumulates] = h.weights + h.masters + h.optimizer + h.gradients
        return found


@lru_cache(maxsize=8192)
def grid_of(
    shape: ModelShape, base: Stack, per_rank: int, kinds: tuple[Checkpointing, ...], micros: tuple[int, ...]
) -> Grid:
    """The grid of an engine, remembered."""
    alone = None
    if base.sharding != "single" or base.offload_optimizer != "none":
        single = replace(
            base, sharding="single", world_size=1, gpus_per_node=1, dp_replicate=1, offload_optimizer="none",
            offload_parameters="none",
        )  # fmt: skip
        # Twice the largest micro-batch: one grid for every number of GPUs.
        alone = grid_of(shape, single, 2 * lcm(*micros), kinds, micros)
    return Grid(shape, base, per_rank, kinds, micros, alone)


@dataclass(frozen=True, slots=True)
class Found:
    """The stack to take, or, where none surely fits, the smallest (`sure` is False)."""

    stack: Stack
    memory: MemoryEstimate
    sure: bool


def fastest(grid: Grid, offer: Offer, limit: float = inf) -> Found | None:
    """The fastest stack that surely fits; where none does, the one that needs least memory.

    None: whatever fits takes at least `limit` seconds per step.
    """
    capacity = offer.gpu.usable_bytes
    best: tuple[Checkpointing, int] | None = None
    best_seconds, sure = limit / EQUAL, False
    left_out = tried_layers = False
    least = _seconds(grid, offer, grid.kinds[0], grid.micros[-1])
    for kind in grid.kinds:
        if least >= EQUAL * best_seconds:
            left_out = True
            break
        if kind != "none" and grid.partial and not tried_layers:
            tried_layers = True
            some = _some_layers(grid, offer, best_seconds)
            sure, left_out = sure or some.fits, left_out or some.left_out
            if some.best is not None:
                best, best_seconds = some.best, some.seconds
        micros = [m for m in grid.micros if grid.at_least(kind, m) <= capacity]
        if not micros:
            continue
        if _seconds(grid, offer, kind, micros[-1]) >= EQUAL * best_seconds:
            left_out = True
            continue
        micro = _largest_that_fits(grid, offer, kind, micros)
        if micro is None:
            continue
        sure, seconds = True, _seconds(grid, offer, kind, micro)
        if seconds < EQUAL * best_seconds:
            best, best_seconds = (kind, _as_fast(grid, offer, kind, micro, seconds)), seconds
    if best is not None:
        return Found(grid.stack(*best), grid.memory(*best), True)
    if sure or left_out:
        return None
    # The smallest: one sequence at a time, or as many as leave nothing to accumulate.
    ends = [(kind, micro) for kind in grid.kinds for micro in {grid.micros[0], grid.micros[-1]}]
    low = min(ends, key=lambda at: (grid.at_least(*at), at[1]))
    limit_bytes = grid.memory(*low).needed_bytes
    close = [at for at in ends if grid.at_least(*at) <= limit_bytes]
    smallest = min(close, key=lambda at: (grid.memory(*at).needed_bytes, at[1]))
    return Found(grid.stack(*smallest), grid.memory(*smallest), False)


@dataclass(frozen=True, slots=True)
class _Some:
    """The fastest with a number of layers recomputed, if faster by what counts; whether any fits, or was left out."""

    best: tuple[int, int] | None
    seconds: float
    fits: bool
    left_out: bool


def _some_layers(grid: Grid, offer: Offer, best_seconds: float) -> _Some:
    """Per micro-batch as few layers as fit: smaller micro-batches first, which need fewer."""
    layers, capacity = grid.shape.num_hidden_layers, offer.gpu.usable_bytes
    even = grid.base.sharding in ("single", "fsdp2")  # no buffers that make the line of needs uneven
    best, fits, left_out, least = None, False, False, False
    for micro in grid.micros:
        start = grid.layers_at_least(micro, capacity)
        slow = start is not None and _seconds(grid, offer, start, micro) >= EQUAL * best_seconds
        if start is not None and not slow:
            if grid.at_least("none", micro) <= capacity and _fits(grid, offer, "none", micro):
                continue
            start = grid.layers_at_least(micro, capacity, exact=True)
            slow = start is not None and _seconds(grid, offer, start, micro) >= EQUAL * best_seconds
        left_out = left_out or slow
        if start is None or slow:
            continue
        count = least_layers(layers, partial(grid.high_bytes, micro), capacity, start)
        if count is None or not _fits(grid, offer, count, micro):
            continue
        fits, seconds = True, _seconds(grid, offer, count, micro)
        if seconds < EQUAL * best_seconds:
            best, best_seconds, least = (count, micro), seconds, even and count == start
    if best is not None and not least:
        count = none_too_many(best[0], partial(grid.high_bytes, best[1]), capacity)
        best = count, best[1]
    return _Some(best, best_seconds, fits, left_out)


def _largest_that_fits(grid: Grid, offer: Offer, kind: Checkpointing, micros: list[int]) -> int | None:
    """The largest of some micro-batches that surely fits; None: not even the smallest does.

    Needs grow with the micro-batch, except that the one which leaves nothing to accumulate keeps no gradients
    between micro-batches: it is tried on its own.
    """
    if _fits(grid, offer, kind, micros[-1]):
        return micros[-1]
    rest = micros[:-1]
    if not rest or not _fits(grid, offer, kind, rest[0]):
        return None
    low, high = 0, len(rest)  # rest[low] fits, rest[high] does not
    guess = high - 1
    while high - low > 1:
        if _fits(grid, offer, kind, rest[guess]):
            low = guess
        else:
            high = guess
        guess = (low + high) // 2
    return rest[low]


def _as_fast(grid: Grid, offer: Offer, kind: Checkpointing, micro: int, seconds: float) -> int:
    """The smallest micro-batch that is as fast as `micro`, within what counts as equal."""
    chosen = micro
    for smaller in reversed([m for m in grid.micros if m < micro]):
        if EQUAL * _seconds(grid, offer, kind, smaller) > seconds or not _fits(grid, offer, kind, smaller):
            break
        chosen = smaller
    return chosen


def _seconds(grid: Grid, offer: Offer, kind: Checkpointing, micro: int) -> float:
    """Of a step. Every stack of a grid has as many tokens per step, so steps compare like tokens."""
    return step_seconds(grid.shape, offer.gpu, grid.stack(kind, micro))


def _fits(grid: Grid, offer: Offer, kind: Checkpointing, micro: int) -> bool:
    memory = grid.memory(kind, micro)
    if verdict(memory, offer.gpu.usable_bytes) != "fits":
        return False
    stack = grid.stack(kind, micro)
    if stack.offload_optimizer == "none" and stack.offload_parameters == "none":
        return True
    if "nvme" in (stack.offload_optimizer, stack.offload_parameters) and not disk_holds(memory, offer):
        return False
    return host_holds(grid.shape, stack, offer)
