"""The highest moment of each phase, from what a rank holds and what the paper step adds to it.

Load, forward, loss, backward, step; and between steps an evaluation and a save. The same code runs on plain numbers
and on sizes that keep their formula (`symbols`).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

from shardwise.estimate.memory.held_out import play_evaluation
from shardwise.estimate.memory.paper import Sheet
from shardwise.estimate.memory.play import Question, play
from shardwise.estimate.memory.states import UPDATE_TEMPORARIES, Held, counts_of
from shardwise.estimate.memory.symbols import whole
from shardwise.estimate.memory.terms import TERMS
from shardwise.estimate.memory.trainer import OURS, Trainer
from shardwise.estimate.stack import Stack
from shardwise.facts.model import ModelShape


@dataclass(frozen=True, slots=True)
class Moments:
    """`sizes`: bytes by term at the highest moment; `states`: what the rank holds then."""

    phases: dict[str, int]
    peak_phase: str
    sizes: dict[str, int]
    states: Held


@lru_cache(maxsize=16384)
def played(question: Question) -> Sheet:
    return play(question)


@lru_cache(maxsize=16384)
def evaluated(question: Question) -> Sheet:
    return play_evaluation(question)


def moments(
    states: Held,
    question: Question,
    stack: Stack,
    shape: ModelShape,
    play_step: Callable[[Question], Sheet] = played,
    play_held_out: Callable[[Question], Sheet] = evaluated,
) -> Moments:
    """All phases of a run and the highest of them. `play_step`, `play_held_out`: how sheets are made."""
    trainer, sheet = question.trainer, play_step(question)
    added = {p: sheet.at_peak.get(p, {}) for p in ("forward", "loss", "backward")}
    added["step"] = update(sheet, states, stack, trainer)
    held = dict.fromkeys(added, states)
    if trainer.kernels:
        between = replace(states, gradients=_resting_gradients(states, shape, stack))
        # Nothing is kept for a backward pass: one sheet serves every kind of checkpointing and accumulation.
        alike = replace(question, checkpointing="none", kept_gradients=0, hook_takes_gradients=False)
        added["evaluation"] = play_held_out(alike).at_peak["evaluation"]
        added["save"] = _save(shape, question, stack)
        held |= {"evaluation": between, "save": between}
    phases = {p: _static(held[p]) + sum(terms.values()) for p, terms in added.items()}
    phases["load"] = _load(states, stack, trainer)
    peak = max(phases, key=lambda p: phases[p])
    at = held.get(peak, states)
    fixed = {
        "weights": at.weights,
        "master_weights": at.masters,
        "optimizer": at.optimizer,
        "gradients": at.gradients,
    }
    sizes = {t: fixed.get(t, 0) + added.get(peak, {}).get(t, 0) for t in TERMS}
    return Moments(phases, peak, sizes, at)


def _static(states: Held) -> int:
    return states.weights + states.masters + states.optimizer + states.gradients


def _load(states: Held, stack: Stack, trainer: Trainer) -> int:
    """Weights arrive: those that stay, and where a trainer shards on the device, the whole model beside them."""
    weights = states.weights + states.masters
    whole = trainer.loads and trainer.name != OURS.name and stack.offload_parameters == "none"
    if whole and stack.sharding in ("fsdp2", "zero3"):
        return int(states.weights * stack.dp_shard * trainer.loads)
    return weights


def update(sheet: Sheet, states: Held, stack: Stack, trainer: Trainer) -> dict[str, int]:
    """What lives, beyond `states`, at the optimizer's worst moment."""
    ours = trainer.name == OURS.name and stack.device == "cpu" and stack.optimizer == "adamw"
    fused = trainer.fused_optimizer or (ours and not stack.sharding.startswith("zero"))
    temporaries = 0.0 if fused else UPDATE_TEMPORARIES.get(stack.optimizer, 0.0)
    elements = states.update_elements
    if stack.offload_optimizer != "none":
        engine = sheet.terms["engine"] if stack.sharding != "fsdp2" else 0
        return {"gradients": sheet.terms["gradients"], "engine": engine}
    state = temporaries * (trainer.state_bytes / 4 if trainer.whole_step or trainer.kernels else 1) * elements
    # Our updater turns one bucket of bf16 gradients into fp32 at a time: +4 for the copy, -2 for what it replaces.
    copied = 0
    if stack.sharding in ("zero1", "zero2", "zero3"):
        if stack.gradient_accumulation_steps == 1 or not trainer.kernels:  # else they are in fp32 already
            copied = 4 * elements  # this rank's gradients in fp32, all at once
    elif states.masters and stack.sharding in ("single", "ddp") and stack.gradient_accumulation_steps == 1:
        copied = (2 if stack.sharding == "single" else 4) * elements
    return {
        "gradients": sheet.terms["gradients"] + copied,
        "engine": sheet.terms["engine"] if stack.sharding not in ("fsdp2",) else 0,
        "temporaries": whole(state),
        "inputs": sheet.terms["inputs"],
    }


def _resting_gradients(states: Held, shape: ModelShape, stack: Stack) -> int:
    """Bytes of gradient buffers that a step does not free: DDP's buckets, and the sums of ZeRO-1."""
    if not states.gradients or stack.sharding not in ("ddp", "zero1"):
        return 0
    return counts_of(shape, stack).trained * (
        4 if stack.sharding == "zero1" or stack.precision == "fp32" else 2
    )


# Looking for NaN in a tensor takes its absolute values, and three booleans per element.
BOOLEANS = 3


def _save(shape: ModelShape, question: Question, stack: Stack) -> dict[str, int]:
    """What a checkpoint adds on the device: one tensor at a time is looked at, or gathered in fp32 by DeepSpeed.

    The copy from which a save in the background is written lies in host memory. What ZeRO-3 gathered for the
    evaluation before is still there.
    """
    largest, around = counts_of(shape, stack).largest, question.around
    if stack.sharding.startswith("zero"):
        return {"engine": around.constant + around.live, "temporaries": 4 * largest}
    width = BOOLEANS + (2 if stack.precision == "bf16" and not stack.master_weights else 4)
    scratch = 0 if stack.offload_parameters != "none" else width * largest // stack.dp_shard
    return {"engine": around.constant, "temporaries": scratch}
