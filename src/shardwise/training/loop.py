"""The training loop: count the step's trained tokens, forward and backward per micro-batch, clip, step, log."""

import math
import signal
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from shardwise.data import Order, Rows
from shardwise.errors import DivergedError, Interrupted
from shardwise.recipe.schedule import learning_rate
from shardwise.recipe.schema import Recipe
from shardwise.runs import RunFolder
from shardwise.training.batches import pack
from shardwise.training.checkpoint.save import Saved, save
from shardwise.training.checks import FirstSteps
from shardwise.training.engines.protocol import Engine
from shardwise.training.meter import Meter, resident_bytes
from shardwise.training.progress import Bar
from shardwise.training.watch import EVALUATION_SECONDS, SAVE_SECONDS, Watch


@dataclass
class Stop:
    """Set by SIGINT, SIGTERM or SIGUSR1 (Slurm's warning); the loop looks once per step, all ranks together."""

    asked: str = ""
    _previous: dict[int, Any] = field(default_factory=dict)

    def install(self) -> None:
        def on_signal(number: int, _: FrameType | None) -> None:
            self.asked = signal.Signals(number).name

        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            self._previous[number] = signal.signal(number, on_signal)


@dataclass(frozen=True)
class Job:
    """Everything one rank trains with."""

    run: RunFolder
    recipe: Recipe
    engine: Engine
    train: Rows
    validation: Rows | None
    order: Order
    meter: Meter
    stop: Stop
    facts: Mapping[str, Any] = field(default_factory=dict)  # what made this run; saved with every checkpoint
    watch: Watch = field(default_factory=Watch)


@dataclass(frozen=True)
class Totals:
    """Sums of a whole training phase; seconds are of steps alone, without evaluation and saving."""

    seconds: float
    tokens: int
    trained_tokens: int
    loss_first: float | None
    loss_last: float | None
    evaluation: float | None = None  # held-out loss after the last step, where there are held-out rows


def train(job: Job, start: int, bar: Bar) -> Totals:
    """Steps `start` to the end of `job.order`, with evaluations and checkpoints on the way.

    Raises DivergedError when loss or gradients are not finite (before the update is made) and Interrupted when a
    stop was asked for (after a checkpoint was saved).
    """
    recipe, engine, order, run = job.recipe, job.engine, job.order, job.run
    lead = engine.ranks.rank == 0
    peak_rate = recipe.optimizer.learning_rate
    micro_batch_size = recipe.training.micro_batch_size
    assert peak_rate != "auto" and micro_batch_size != "auto"
    evaluate_every, save_every = recipe.evaluation.every_steps, recipe.checkpoint.every_steps
    assert evaluate_every != "auto" and save_every != "auto"
    seconds, tokens, trained_tokens = 0.0, 0, 0
    first: float | None = None
    mean: float | None = None
    held_out: float | None = None

    first_steps = FirstSteps(engine, recipe)
    for step in range(start, order.steps):
        began = time.perf_counter()
        rate = learning_rate(recipe.schedule, peak_rate, step, order.steps)
        step_trained = order.trained_tokens(step)  # of all ranks: the order is the same everywhere
        shares = order.micro_batches(step, engine.ranks.rank, engine.ranks.world_size, micro_batch_size)
        job.watch.beat(step + 1, "rows")
        batches = [pack(job.train, bins) for bins in shares]
        losses: list[torch.Tensor] = []
        total = torch.zeros((), dtype=torch.float32, device=engine.device)
        with job.meter.step(max(b.tokens for b in batches)):
            for i, batch in enumerate(batches):
                job.meter.phase("forward")
                job.watch.beat(step + 1, "forward")
                loss = engine.forward(job.meter.inputs(batch.to(engine.device)))
                losses.append(loss.detach())
                total += losses[-1]
                job.meter.phase("backward")
                job.watch.beat(step + 1, "backward")
                engine.backward(loss, 1.0 / step_trained, last=i == len(batches) - 1)
                del loss
            job.watch.beat(step + 1, "loss of all")
            total, stop = _agree(engine, total, bool(job.stop.asked))
            mean = total / step_trained
            _check_finite(job, step, mean, "loss", losses, shares)
            first_steps.before_update(batches)
            job.meter.phase("step")
            job.watch.beat(step + 1, "update")
            norm = engine.step(rate, recipe.optimizer.max_grad_norm)
        _check_finite(job, step, norm, "gradient norm", losses, shares)
        elapsed = time.perf_counter() - began
        job.watch.step_took(elapsed)
        step_tokens = order.tokens(step)
        seconds, tokens, trained_tokens = (
            seconds + elapsed,
            tokens + step_tokens,
            trained_tokens + step_trained,
        )
        first = mean if first is None else first
        if lead:
            run.event(
                "step",
                step=step + 1,
                loss=mean,
                learning_rate=rate,
                grad_norm=norm,
                tokens=step_tokens,
                trained_tokens=step_trained,
                seconds=elapsed,
                tokens_per_second=step_tokens / elapsed,
                allocated_bytes=job.meter.allocated_bytes,
                peak_allocated_bytes=job.meter.peak.bytes,
                resident_bytes=resident_bytes(),
                epoch=(step + 1) / order.steps_per_epoch,
            )
            bar.step(step + 1, mean, tokens / seconds, job.meter.peak.bytes)
        for text in first_steps.after_update(mean):
            if lead:
                bar.say(f"warning: {text}")
        done = step + 1 == order.steps
        held_out = None
        if done or (evaluate_every and (step + 1) % evaluate_every == 0):
            held_out = log_evaluation(job, step + 1, bar)
        if done or stop or (save_every and (step + 1) % save_every == 0):
            checkpoint(job, step + 1, held_out)
        if stop and not done:
            raise Interrupted(
                f"stopped after step {step + 1} of {order.steps} ({job.stop.asked or 'asked on another rank'})",
                "a stop was asked for; the state was saved first",
                f"continue with: shardwise train --resume {run.path}",
            )
    return Totals(seconds, tokens, trained_tokens, first, mean, held_out)


def checkpoint(job: Job, step: int, evaluation_loss: float | None) -> Saved:
    """Save the state after `step` steps and say so. `evaluation_loss`: held-out loss at this very step."""
    began = time.perf_counter()
    job.watch.beat(step, "saving", SAVE_SECONDS)
    facts = {**job.facts, "evaluation_loss": evaluation_loss, "layout": job.engine.facts()}
    saved = save(job.run, job.engine, step, facts, keep=job.recipe.checkpoint.keep)
    if job.engine.ranks.rank == 0:
        job.run.event(
            "checkpoint",
            step=step,
            path=str(saved.path),
            bytes=saved.bytes,
            seconds=time.perf_counter() - began,
            removed=list(saved.removed),
        )
    return saved


def evaluate(job: Job) -> tuple[float, int] | None:
    """(mean loss over all held-out trained tokens, their count), the same for every batch size and rank count."""
    rows, engine = job.validation, job.engine
    if rows is None or len(rows) == 0:
        return None
    length, size = job.order.sequence_length, job.recipe.training.micro_batch_size
    assert size != "auto"
    bins = list(_in_order(rows, length * size))
    world = engine.ranks.world_size
    bins += [()] * (-len(bins) % world)  # every rank runs the same number of forwards
    total = torch.zeros((), dtype=torch.float64, device="cpu")
    engine.module.eval()
    with torch.no_grad():
        for bin_ in bins[engine.ranks.rank :: world]:
            batch = pack(job.validation, [bin_] if bin_ else [])  # type: ignore[arg-type]
            total += engine.forward(batch.to(engine.device)).double().cpu()
    engine.module.train()
    if world > 1:
        shared = total.to(torch.float32).to(engine.device)
        dist.all_reduce(shared)
        total = shared.double().cpu()
    count = int(rows.trained.sum())
    return float(total) / count, count


def log_evaluation(job: Job, step: int, bar: Bar) -> float | None:
    """Evaluate, record and show it. Returns the loss."""
    job.meter.phase("evaluation")
    job.watch.beat(step, "evaluation", EVALUATION_SECONDS)
    result = evaluate(job)
    if result is None:
        return None
    loss, count = result
    if job.engine.ranks.rank == 0:
        perplexity = math.exp(min(loss, 700.0))
        job.run.event("evaluation", step=step, loss=loss, perplexity=perplexity, trained_tokens=count)
        bar.say(f"held-out loss after {step} steps: {loss:.4f} (perplexity {perplexity:.2f})")
    return loss


def _in_order(rows: Rows, tokens: int) -> Iterable[tuple[int, ...]]:
    """Held-out rows one after the other, as many as fit into `tokens` at a time."""
    bin_: list[int] = []
    filled = 0
    for i, length in enumerate(rows.lengths.tolist()):
        if bin_ and filled + length > tokens:
            yield tuple(bin_)
            bin_, filled = [], 0
        bin_.append(i)
        filled += length
    if bin_:
        yield tuple(bin_)


def _agree(engine: Engine, total: torch.Tensor, stop: bool) -> tuple[float, bool]:
    """Summed loss of all ranks, and whether any of them was asked to stop: one collective for both."""
    if engine.ranks.world_size == 1:
        return float(total), stop
    both = torch.stack([total, torch.tensor(float(stop), device=total.device)])
    dist.all_reduce(both)
    return float(both[0]), bool(both[1] > 0)


def _check_finite(
    job: Job,
    step: int,
    value: float,
    what: str,
    losses: Sequence[torch.Tensor],
    shares: Sequence[Sequence[Sequence[int]]],
) -> None:
    """Raise DivergedError naming ranks and rows. `value` is the same on all ranks, so all come here together."""
    if math.isfinite(value):
        return
    bad = [i for i, loss in enumerate(losses) if not math.isfinite(float(loss))]
    mine = [row for i in bad for bin_ in shares[i] for row in bin_]
    found: list[Any] = [mine]
    if job.engine.ranks.world_size > 1:
        found = [None] * job.engine.ranks.world_size
        dist.all_gather_object(found, mine)
    told = [f"rank {rank}, rows {_places(job, rows)}" for rank, rows in enumerate(found) if rows]
    if not told:  # the losses are finite, their gradients are not
        told = [f"all ranks, rows {_places(job, [i for bin_ in job.order.step(step) for i in bin_])}"]
    raise DivergedError(
        f"step {step + 1}: {what} is {value} ({'; '.join(told)})",
        "no update was made and nothing was saved: the last checkpoint is from before",
        "look at these rows, lower optimizer.learning_rate, or take a smaller optimizer.max_grad_norm",
    )


def _places(job: Job, rows: Sequence[int]) -> str:
    named = [":".join(map(str, job.train.source(i))) for i in rows[:4]]
    return ", ".join(named) + (f" and {len(rows) - 4} more" if len(rows) > 4 else "")
