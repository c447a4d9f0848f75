"""Which rows each optimizer step sees: a pure function of the rows' lengths, the recipe and the step number.

Nothing here is consumed or advanced, so a run that resumes at step i sees what an uninterrupted one sees.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Protocol

import numpy as np

from shardwise.data.packing import pack
from shardwise.data.store import Rows
from shardwise.errors import DataError
from shardwise.recipe.schema import Recipe

Bin = tuple[int, ...]  # numbers of the rows in one packed sequence


class Documents(Protocol):
    """Rows by number, as a step's bins name them: `Rows`, or those of a stream that this rank has read."""

    def row(self, i: int) -> tuple[np.ndarray, np.ndarray]: ...

    def source(self, i: int) -> tuple[str, int]: ...


class Feed(Protocol):
    """What the training loop asks for, of an `Order` or of a stream; each method as described there.

    Of a stream all methods are collective, and `step` is this rank's share.
    """

    @property
    def steps(self) -> int: ...

    @property
    def sequence_length(self) -> int: ...

    def micro_batches(
        self, step: int, rank: int, world_size: int, micro_batch_size: int
    ) -> tuple[tuple[Bin, ...], ...]: ...

    def step(self, step: int) -> tuple[Bin, ...]: ...

    def tokens(self, step: int) -> int: ...

    def trained_tokens(self, step: int) -> int: ...

    def passes(self, step: int) -> float | None: ...

    def position(self, step: int) -> dict[str, Any]: ...


@dataclass(frozen=True)
class Order:
    """The bins of every step. Made by `make_order`.

    `steps` optimizer steps; a step holds `global_batch_size` bins, the last one of an epoch and of the run what
    is left (its loss is divided by its own trained tokens). No step crosses an epoch.
    """

    rows: Rows
    sequence_length: int
    packing: bool
    global_batch_size: int
    seed: int
    weights: tuple[float, ...]
    steps: int
    epochs: float
    _starts: tuple[int, ...] = field(repr=False)  # first step of each epoch, and the end of the last
    _last: int = field(repr=False)  # bins that the run takes of its last epoch

    @property
    def steps_per_epoch(self) -> int:
        """Steps of the first epoch; every epoch has as many unless a source's weight is no whole number."""
        return self._steps_of(0)

    @property
    def efficiency(self) -> float:
        """Tokens in the first epoch's bins / (bins x sequence_length)."""
        bins = self._epoch(0)
        return sum(self._size(b) for b in bins) / (len(bins) * self.sequence_length)

    def epoch_of(self, step: int) -> int:
        """The epoch (from 0) that a step belongs to."""
        self._check(step)
        return int(np.searchsorted(np.asarray(self._starts), step, side="right")) - 1

    def passes(self, step: int) -> float | None:
        """Epochs done when so many steps are done."""
        return step / self.steps_per_epoch

    def step(self, step: int) -> tuple[Bin, ...]:
        """The bins of one step, over all ranks."""
        epoch = self.epoch_of(step)
        first = (step - self._starts[epoch]) * self.global_batch_size
        last = self._last if epoch == len(self._starts) - 2 else len(self._epoch(epoch))
        return self._epoch(epoch)[first : min(first + self.global_batch_size, last)]

    def micro_batches(
        self, step: int, rank: int, world_size: int, micro_batch_size: int
    ) -> tuple[tuple[Bin, ...], ...]:
        """One rank's share of a step, cut into micro-batches.

        Every rank gets the same number of micro-batches; one without work gets empty ones (). The shares are
        disjoint and their union is `step(step)`.
        """
        bins = self.step(step)
        count = math.ceil(math.ceil(len(bins) / world_size) / micro_batch_size)
        mine = bins[rank::world_size]
        return tuple(mine[i * micro_batch_size : (i + 1) * micro_batch_size] for i in range(count))

    def tokens(self, step: int) -> int:
        """Tokens of a step, over all ranks."""
        return sum(self._size(b) for b in self.step(step))

    def trained_tokens(self, step: int) -> int:
        """Tokens with a label of a step, over all ranks."""
        return sum(int(self.rows.trained[list(b)].sum()) for b in self.step(step))

    def position(self, step: int) -> dict[str, Any]:
        """Nothing beside the number of steps has to be kept."""
        return {}

    def _check(self, step: int) -> None:
        if not 0 <= step < self.steps:
            raise IndexError(f"step {step} is outside 0..{self.steps - 1}")

    def _size(self, one: Bin) -> int:
        return int(self.rows.lengths[list(one)].sum())

    def _epoch(self, epoch: int) -> tuple[Bin, ...]:
        return _epoch_bins(self.rows, self.sequence_length, self.packing, self.seed, self.weights, epoch)

    def _steps_of(self, epoch: int) -> int:
        return math.ceil(len(self._epoch(epoch)) / self.global_batch_size)


def make_order(
    rows: Rows,
    *,
    sequence_length: int,
    packing: bool,
    global_batch_size: int,
    epochs: float | None = None,
    max_steps: int | None = None,
    max_tokens: int | None = None,
    seed: int = 0,
    weights: Mapping[int, float] | tuple[float, ...] | None = None,
) -> Order:
    """The order of a run of `epochs` passes (fractions allowed), `max_steps` or `max_tokens`.

    A part of an epoch is that share of its bins, rounded up. Tokens are counted as the model sees them, repeated
    context and prompts included; the bin that reaches `max_tokens` is the last one, so a run takes at least
    `max_tokens` and less than one sequence more.

    `weights` per source (default: the weights of `rows`): 0.5 draws half of a source in an epoch, the other
    half in the next; 2 draws it twice. Each epoch is shuffled with (seed, epoch), packed by
    first-fit-decreasing, and its bins are shuffled.

    Raises DataError when there is no row, or no length or two lengths of the run are given.
    """
    if len(rows) == 0:
        raise DataError("there is no row to train on", "every row was refused or dropped", "see the report")
    if [epochs, max_steps, max_tokens].count(None) != 2:
        raise DataError(
            f"epochs={epochs}, max_steps={max_steps} and max_tokens={max_tokens}",
            "a run has exactly one length",
            "give one of them",
        )
    if int(rows.lengths.max()) > sequence_length:
        raise DataError(
            f"a row has {int(rows.lengths.max())} tokens, sequence_length is {sequence_length}",
            "rows are cut when they are prepared, with one sequence_length for both",
            "prepare the rows with the sequence_length of the order",
        )
    given = rows.weights if weights is None else weights
    if isinstance(given, Mapping):
        given = tuple(float(given.get(i, 1.0)) for i in range(int(rows.sources.max()) + 1))
    drawn = [w for i, w in enumerate(given) if bool((rows.sources == i).any())]
    if any(w <= 0 for w in drawn):
        raise DataError(f"source weights {given}", "a weight is above 0", "leave a source out instead")

    def make(steps: int, passes: float, starts: tuple[int, ...], last: int) -> Order:
        return Order(
            rows, sequence_length, packing, global_batch_size, seed, tuple(given), steps, passes, starts, last
        )

    probe = make(1, 1.0, (0, 1), 1)
    same = all(w == int(w) for w in drawn)  # then every epoch has as many bins and tokens
    starts, passes, last = _run_length(probe, same, epochs, max_steps, max_tokens)
    return make(starts[-1], passes, starts, last)


def _run_length(
    probe: Order, same: bool, epochs: float | None, max_steps: int | None, max_tokens: int | None
) -> tuple[tuple[int, ...], float, int]:
    """(first step of each epoch and the end of the last, epochs, bins taken of the last epoch)."""
    starts = [0]
    passes = 0.0
    left = float(epochs if epochs is not None else max_steps if max_steps is not None else max_tokens or 0)
    count = tokens = last = 0
    while left > 1e-9:
        epoch = len(starts) - 1
        if not (same and epoch):
            bins = probe._epoch(epoch)
            count, tokens = len(bins), sum(probe._size(b) for b in bins)
        steps = math.ceil(count / probe.global_batch_size)
        whole = 1 if epochs is not None else steps if max_steps is not None else tokens
        if left >= whole:
            last = count
        elif epochs is not None:
            last = max(1, math.ceil(left * count - 1e-9))
        elif max_steps is not None:
            last = min(count, int(left) * probe.global_batch_size)
        else:
            reached = np.cumsum([probe._size(b) for b in probe._epoch(epoch)])
            last = int(np.searchsorted(reached, left)) + 1
        starts.append(starts[-1] + math.ceil(last / probe.global_batch_size))
        passes += min(1.0, left / whole)
        left -= whole
    return tuple(starts), passes, last


def run_order(rows: Rows, recipe: Recipe, sequence_length: int, global_batch_size: int) -> Order:
    """The order of a recipe's run: what the planner counts and what the trainer goes through.

    One epoch where the recipe gives no length. Raises what `make_order` raises.
    """
    training = recipe.training
    one = training.max_steps is None and training.max_tokens is None and training.epochs is None
    return make_order(
        rows,
        sequence_length=sequence_length,
        packing=recipe.data.packing,
        global_batch_size=global_batch_size,
        epochs=1.0 if one else training.epochs,
        max_steps=training.max_steps,
        max_tokens=training.max_tokens,
        seed=training.seed,
    )


def bins_of(
    rows: Rows, sequence_length: int, packing: bool, seed: int, weights: tuple[float, ...], epoch: int
) -> tuple[Bin, ...]:
    """All bins of one epoch of rows, shuffled."""
    random = np.random.default_rng([seed, epoch])
    drawn: list[np.ndarray] = []
    whole: list[list[int]] = []  # sequences of continuous text, already full
    for source, weight in enumerate(weights):
        mine = np.flatnonzero((rows.sources == source) & (rows.groups < 0))
        drawn.append(_draw(mine, weight, seed, source, epoch))
        text = np.flatnonzero((rows.sources == source) & (rows.groups >= 0))
        if len(text):
            edges = np.flatnonzero(np.diff(rows.groups[text])) + 1
            parts = np.split(text, edges)
            picked = _draw(np.arange(len(parts)), weight, seed, source, epoch)
            whole += [parts[i].tolist() for i in picked.tolist()]
    chosen = random.permutation(np.concatenate(drawn)) if drawn else np.zeros(0, np.int64)
    if packing:
        bins = [chosen[one].tolist() for one in pack(rows.lengths[chosen], sequence_length)]
    else:
        bins = [[i] for i in chosen.tolist()]
    bins += whole
    return tuple(tuple(bins[i]) for i in random.permutation(len(bins)).tolist())


_epoch_bins = lru_cache(maxsize=4)(bins_of)


def _draw(rows: np.ndarray, weight: float, seed: int, source: int, epoch: int) -> np.ndarray:
    """`weight` x len(rows) of them: whole copies, and a window that moves on through a fixed shuffle."""
    copies = int(weight)
    share = weight - copies
    parts = [rows] * copies
    if share > 0 and len(rows):
        shuffled = np.random.default_rng([seed, 1_000_003, source]).permutation(rows)
        first, last = (round(share * len(rows) * e) for e in (epoch, epoch + 1))
        if last == first and copies == 0 and len(rows) * share < 1 and epoch == 0:
            last = first + 1  # a tiny source still appears
        parts.append(shuffled[np.arange(first, last) % len(rows)])
    return np.concatenate(parts) if parts else rows[:0]
