"""NaN and infinity in a loss or a gradient: found before the update, named by rank and rows, and what then."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from shardwise.data import Documents, Feed
from shardwise.errors import DivergedError
from shardwise.recipe.schema import Training
from shardwise.training.batches import MicroBatch
from shardwise.training.engines.protocol import Engine
from shardwise.training.layers import decoder_layers

SHOWN_ROWS = 4


class NotFiniteError(DivergedError):
    """Raised on all ranks together, before the update of `step` (counted from 0)."""

    def __init__(self, what: str, why: str = "", hint: str = "", step: int = 0) -> None:
        super().__init__(what, why, hint)
        self.step = step


@dataclass
class Policy:
    """What the recipe wants done, and the steps whose update has been left out so far."""

    training: Training
    skipped: set[int] = field(default_factory=set)

    def decide(self, problem: NotFiniteError) -> str:
        """`skip` or `rollback`. Raises the problem when the run is to stop or too much has been skipped."""
        kind, limit = self.training.non_finite, self.training.non_finite_limit
        if kind == "stop":
            raise problem
        if len(self.skipped | {problem.step}) > limit:
            raise DivergedError(
                problem.what,
                f"{len(self.skipped)} updates were skipped already, training.non_finite_limit is {limit}",
                problem.hint,
            )
        self.skipped.add(problem.step)
        return kind


def check_loss(
    value: float,
    losses: Sequence[torch.Tensor],
    shares: Sequence[Sequence[Sequence[int]]],
    engine: Engine,
    order: Feed,
    rows: Documents,
    step: int,
) -> None:
    """Raise NotFiniteError naming ranks and rows. `value` is the same on all ranks: all come here together."""
    if math.isfinite(value):
        return
    bad = [i for i, loss in enumerate(losses) if not math.isfinite(float(loss))]
    raise _problem(step, f"loss is {value}", _found(engine, shares, bad, rows), order, rows)


def check_gradient(
    norm: float,
    batches: Sequence[MicroBatch],
    shares: Sequence[Sequence[Sequence[int]]],
    engine: Engine,
    order: Feed,
    rows: Documents,
    step: int,
    scale: float,
) -> None:
    """As `check_loss`, for the norm of the gradient of all ranks, after an engine has refused the update.

    Whose rows it were is not in a sum over ranks: the step's passes are done once more, and the gradients that
    flow through this rank's layers are looked at.
    """
    if math.isfinite(norm):
        return
    bad: list[int] = []
    for i, batch in enumerate(batches):
        with _listening(engine) as seen:
            loss = engine.forward(batch.to(engine.device))
            engine.backward(loss, scale, last=i == len(batches) - 1)
        if not all(bool(ok) for ok in seen):
            bad.append(i)
    engine.discard()
    raise _problem(step, f"gradient norm is {norm}", _found(engine, shares, bad, rows), order, rows)


@contextmanager
def _listening(engine: Engine) -> Iterator[list[torch.Tensor]]:
    """Whether each gradient that comes out of a layer of this rank is finite."""
    seen: list[torch.Tensor] = []

    def note(grad: torch.Tensor) -> None:
        seen.append(torch.isfinite(grad).all())

    def hook(_: Any, __: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        if isinstance(hidden, torch.Tensor) and hidden.requires_grad:
            hidden.register_hook(note)

    handles = [layer.register_forward_hook(hook) for layer in decoder_layers(engine.module)]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _found(
    engine: Engine, shares: Sequence[Sequence[Sequence[int]]], bad: Sequence[int], rows: Documents
) -> list[tuple[int, list[str]]]:
    """(rank, places of rows) of every rank's micro-batches `bad` (collective)."""
    mine = _places(rows, [row for i in bad for bin_ in shares[i] for row in bin_])
    found: list[Any] = [mine]
    if engine.ranks.world_size > 1:
        found = [None] * engine.ranks.world_size
        dist.all_gather_object(found, mine)
    return [(rank, places) for rank, places in enumerate(found) if places]


def _problem(
    step: int, what: str, found: Sequence[tuple[int, list[str]]], order: Feed, rows: Documents
) -> NotFiniteError:
    told = [f"rank {rank}, rows {_shown(places)}" for rank, places in found]
    if not told:  # not seen again, or only between the last layer and the embeddings
        places = _places(rows, [i for bin_ in order.step(step) for i in bin_])
        told = [f"all ranks, rows {_shown(places)}"]
    return NotFiniteError(
        f"step {step + 1}: {what} ({'; '.join(told)})",
        "no update was made and nothing was saved: the last checkpoint is from before",
        "look at these rows, lower optimizer.learning_rate, take a smaller optimizer.max_grad_norm, or set "
        "training.non_finite: skip or rollback",
        step,
    )


def _places(rows: Documents, numbers: Sequence[int]) -> list[str]:
    return [":".join(map(str, rows.source(i))) for i in numbers]


def _shown(places: Sequence[str]) -> str:
    more = len(places) - SHOWN_ROWS
    return ", ".join(places[:SHOWN_ROWS]) + (f" and {more} more" if more > 0 else "")
