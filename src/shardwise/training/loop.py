"""The training loop: count the step's trained tokens, forward and backward per micro-batch, clip, step, log."""

import math
import signal
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from shardwise.data import Documents, Feed, Rows
from shardwise.errors import DivergedError, Interrupted, RuleError
from shardwise.recipe.schedule import learning_rate
from shardwise.recipe.schema import Recipe
from shardwise.runs import RunFolder
from shardwise.training.batches import pack
from shardwise.training.checkpoint.load import load
from shardwise.training.checkpoint.saver import Saver
from shardwise.training.checks import FirstSteps
from shardwise.training.engines.protocol import Engine
from shardwise.training.finite import NotFiniteError, Policy, check_gradient, check_loss
from shardwise.training.meter import LOOK_AHEAD, Meter, resident_bytes
from shardwise.training.progress import Bar
from shardwise.training.watch import EVALUATION_SECONDS, SAVE_SECONDS, Watch
from shardwise.units import format_seconds


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
    train: Documents
    validation: Rows | None
    order: Feed
    meter: Meter
    stop: Stop
    facts: Mapping[str, Any] = field(default_factory=dict)  # what made this run; saved with every checkpoint
    watch: Watch = field(default_factory=Watch)
    _savers: list[Saver] = field(default_factory=list)

    @property
    def saver(self) -> Saver:
        if not self._savers:
            asked = self.recipe.checkpoint.background
            background = self.engine.device.type == "cuda" if asked is None else asked
            self._savers.append(Saver(self.run, self.engine, self.recipe.checkpoint.keep, background))
        return self._savers[0]


@dataclass(frozen=True)
class Totals:
    """Sums of a whole training phase; seconds are of steps alone, without evaluation and saving."""

    seconds: float
    tokens: int
    trained_tokens: int
    loss_first: float | None
    loss_last: float | None
    evaluation: float | None = None  # held-out loss after the last step, where there are held-out rows
    skipped_steps: tuple[int, ...] = ()  # counted from 1; no update was made in them


def train(job: Job, start: int, bar: Bar) -> Totals:
    """Steps `start` to the end of `job.order`, with evaluations and checkpoints on the way.

    Raises DivergedError when loss or gradients are not finite (before the update is made) and the recipe does
    not want that step skipped, and Interrupted when a stop was asked for (after a checkpoint was saved).
    """
    recipe, engine, order, run = job.recipe, job.engine, job.order, job.run
    lead = engine.ranks.rank == 0
    peak_rate = recipe.optimizer.learning_rate
    assert peak_rate != "auto"
    evaluate_every, save_every = recipe.evaluation.every_steps, recipe.checkpoint.every_steps
    assert evaluate_every != "auto" and save_every != "auto"
    seconds, tokens, trained_tokens = 0.0, 0, 0
    first: float | None = None
    mean: float | None = None
    held_out: float | None = None

    if recipe.training.non_finite == "rollback" and recipe.data.streaming:
        raise RuleError(
            "training.non_finite is rollback and data.streaming is true",
            "rows of a stream that have passed are not read again",
            "use training.non_finite: skip, or stop and resume",
        )
    lengths = getattr(job.train, "lengths", None)
    if lengths is not None:  # those of a stream are not known beforehand
        job.meter.choose(start, _largest_micro_batches(job, start, lengths))
    if recipe.training.compile:
        bar.say("compiling the layers in the first step: that takes from half a minute to a few minutes")
    first_steps = FirstSteps(engine, recipe)
    policy = Policy(recipe.training)
    step = start
    bar.begin()
    while step < order.steps:
        stop = False
        if step not in policy.skipped:  # else it was skipped once, and the run has gone back behind it
            began, used = time.perf_counter(), time.process_time()
            rate = learning_rate(recipe.schedule, peak_rate, step, order.steps)
            try:
                mean, norm, stop = _update(job, step, rate, first_steps)
            except NotFiniteError as problem:
                back, stop = _left_out(job, problem, policy)
                if back is not None:
                    step = back
                    continue
            else:
                elapsed, used = time.perf_counter() - began, time.process_time() - used
                job.watch.step_took(elapsed)
                seconds, tokens = seconds + elapsed, tokens + order.tokens(step)
                trained_tokens += order.trained_tokens(step)
                if recipe.training.compile and first is None:
                    bar.say(f"the first step took {format_seconds(elapsed)}, compilation included")
                first = mean if first is None else first
                if lead:
                    _log_step(job, step, mean, norm, rate, elapsed, used)
                    bar.step(step + 1, mean, tokens / seconds, job.meter.peak.bytes or None)
                for text in first_steps.after_update(mean):
                    if lead:
                        bar.say(f"warning: {text}")
        step += 1
        done = step == order.steps
        held_out = None
        if done or (evaluate_every and step % evaluate_every == 0):
            held_out = log_evaluation(job, step, bar)
        if done or stop or (save_every and step % save_every == 0):
            checkpoint(job, step, held_out, wait=done or stop)
        if stop and not done:
            raise Interrupted(
                f"stopped after step {step} of {order.steps} ({job.stop.asked or 'asked on another rank'})",
                "a stop was asked for; the state was saved first",
                f"continue with: shardwise train --resume {run.path}",
            )
    skipped = tuple(sorted(s + 1 for s in policy.skipped))
    return Totals(seconds, tokens, trained_tokens, first, mean, held_out, skipped)


def _largest_micro_batches(job: Job, start: int, lengths: np.ndarray) -> list[int]:
    """Tokens of this rank's largest micro-batch of every step that comes soon."""
    order, ranks, size = job.order, job.engine.ranks, job.recipe.training.micro_batch_size
    assert size != "auto"
    found = []
    for step in range(start, min(order.steps, start + LOOK_AHEAD)):
        shares = order.micro_batches(step, ranks.rank, ranks.world_size, size)
        found.append(max(sum(int(lengths[list(b)].sum()) for b in bins) for bins in shares))
    return found


def _update(job: Job, step: int, rate: float, first_steps: FirstSteps) -> tuple[float, float, bool]:
    """One optimizer step: (loss per trained token, gradient norm, whether a stop was asked for).

    Raises NotFiniteError, on all ranks, when there was no update; and what a save in the background failed with.
    """
    engine, order = job.engine, job.order
    micro_batch_size = job.recipe.training.micro_batch_size
    assert micro_batch_size != "auto"
    step_trained = order.trained_tokens(step)  # of all ranks: the order is the same everywhere
    shares = order.micro_batches(step, engine.ranks.rank, engine.ranks.world_size, micro_batch_size)
    job.watch.beat(step + 1, "rows")
    batches = [pack(job.train, bins) for bins in shares]
    losses: list[torch.Tensor] = []
    total = torch.zeros((), dtype=torch.float32, device=engine.device)
    with job.meter.step(max(b.tokens for b in batches), step):
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
        total_loss, stop = _agree(job, total)
        mean = total_loss / step_trained
        check_loss(mean, losses, shares, engine, order, job.train, step)
        first_steps.before_update(batches)
        job.meter.phase("step")
        job.watch.beat(step + 1, "update")
        norm = engine.step(rate, job.recipe.optimizer.max_grad_norm)
    check_gradient(norm, batches, shares, engine, order, job.train, step, 1.0 / step_trained)
    return mean, norm, stop


def _left_out(job: Job, problem: NotFiniteError, policy: Policy) -> tuple[int | None, bool]:
    """After a step without an update: (steps done, where the run has gone back; whether a stop was asked for).

    Raises the problem when the recipe wants that, or does not want any more of them.
    """
    engine, step = job.engine, problem.step
    engine.discard()
    job.saver.collect()  # it is from before, and good
    kind = policy.decide(problem)
    _, stop = _agree(job, torch.zeros((), device=engine.device))
    told = f"{problem.what}: its update is left out ({len(policy.skipped)} of at most "
    told += f"{job.recipe.training.non_finite_limit})"
    back = None
    if kind == "rollback":
        kept = [c for c in job.run.checkpoints() if c.step <= step]
        if not kept:
            raise DivergedError(problem.what, "there is no checkpoint yet to go back to", problem.hint)
        back = kept[-1].step
        load(kept[-1].path, engine)
        told += f"; back to the checkpoint of step {back}"
    if engine.ranks.rank == 0:
        job.run.event("warning", message=told, step=step + 1, skipped=True)
        print(f"warning: {told}", file=sys.stderr, flush=True)
        if back is not None:
            job.run.event("resume", step=back, path=str(job.run.checkpoint_path(back)))
    return back, stop


def _log_step(
    job: Job, step: int, mean: float, norm: float, rate: float, elapsed: float, used: float
) -> None:
    tokens, live = job.order.tokens(step), job.meter.allocated_bytes
    job.run.event(
        "step",
        step=step + 1,
        loss=mean,
        learning_rate=rate,
        grad_norm=norm,
        tokens=tokens,
        trained_tokens=job.order.trained_tokens(step),
        seconds=elapsed,
        cpu_seconds=used,
        tokens_per_second=tokens / elapsed,
        allocated_bytes=live,
        peak_allocated_bytes=max(job.meter.peak.bytes, live),  # what lives, before a step has been followed
        resident_bytes=resident_bytes(),
        epoch=job.order.passes(step + 1),
    )


def checkpoint(job: Job, step: int, evaluation_loss: float | None, wait: bool = True) -> None:
    """Save the state after `step` steps. `evaluation_loss`: held-out loss at this very step.

    `wait`: until it is published; else it may go on in the background.
    """
    job.watch.beat(step, "saving", SAVE_SECONDS)
    facts = {**job.facts, "evaluation_loss": evaluation_loss, "layout": job.engine.facts()}
    facts["data_position"] = job.order.position(step)
    job.saver.save(step, facts, wait)


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
        shared = total.to(engine.device)
        dist.all_reduce(shared)
        total = shared.cpu()
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


def _agree(job: Job, total: torch.Tensor) -> tuple[float, bool]:
    """Summed loss of all ranks, and whether any of them was asked to stop: one collective for both.

    It also tells when every rank has written its part of a save in the background, which is published then.
    """
    world, stop, ended = job.engine.ranks.world_size, bool(job.stop.asked), job.saver.ended
    summed = float(total)
    if world > 1:
        flags = torch.tensor([float(stop), float(ended)], device=total.device)
        shared = torch.cat([total.reshape(1), flags])
        dist.all_reduce(shared)
        summed, stop, ended = float(shared[0]), bool(shared[1] > 0), int(shared[2]) == world
    if ended:
        job.watch.beat(0, "saving", SAVE_SECONDS)
        job.saver.collect()
    return summed, stop
