"""Which engine a recipe runs on, where it leaves that open: every legal one is estimated, and the choice explained.

The order is that of `shardwise plan`: what surely fits, then the fastest, and of equals (3 %) the simplest: single,
ddp, fsdp2, ZeRO-1, 2, 3; then those with states, or weights too, in host memory or on disk.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from shardwise.errors import RuleError
from shardwise.estimate.memory.formula import estimate_memory
from shardwise.estimate.speed import estimate_speed
from shardwise.estimate.stack import Place, Stack
from shardwise.facts.gpus import Offer
from shardwise.facts.model import ModelShape
from shardwise.plan.model import host_problem, verdict
from shardwise.plan.question import bucket, engine_name, simplicity
from shardwise.plan.recomputation import least_layers, none_too_many
from shardwise.recipe.schema import Recipe
from shardwise.rules import Problem, Situation, problems
from shardwise.units import format_bytes

# (sharding, offload of optimizer states, offload of parameters), simplest first
_SPLIT: tuple[tuple[str, Place, Place], ...] = (
    ("ddp", "none", "none"),
    ("fsdp2", "none", "none"),
    ("zero1", "none", "none"),
    ("zero2", "none", "none"),
    ("zero3", "none", "none"),
)
_OFFLOADED: tuple[tuple[str, Place, Place], ...] = (
    ("fsdp2", "cpu", "cpu"),
    ("zero2", "cpu", "none"),
    ("zero3", "cpu", "cpu"),
    ("zero3", "nvme", "nvme"),
)


@dataclass(frozen=True, slots=True)
class Chosen:
    """A stack with the reason for its engine, and for its micro-batch and checkpointing."""

    stack: Stack
    engine_why: str
    size_why: str
    notes: tuple[str, ...] = ()


@dataclass(slots=True)
class _Tried:
    """One sharding with all its micro-batches: the least it needs, and its fastest stack that fits."""

    least_bytes: int
    least: Stack
    host_fits: bool
    best_seconds: float = float("inf")
    best: Stack | None = None


def choose(
    recipe: Recipe, shape: ModelShape, offer: Offer, draft: Stack, batch: int, where: Situation | None
) -> Chosen:
    """The fastest stack that fits; of equals (3 %) the simpler engine. When none fits, the smallest.

    `where`: the installation that will run it, so that `auto` asks for nothing that is not there; None: not known.
    Raises RuleError when the engine that was asked for cannot run on so many ranks.
    """
    tried: list[_Tried] = []
    barred: dict[str, str] = {}
    for base in shardings(recipe, draft):
        obstacle = _obstacle(recipe, shape, base, where) if recipe.engine.name == "auto" else None
        if obstacle is None:
            tried.append(_try(recipe, shape, offer, base, batch))
        else:
            barred[obstacle.rule] = (
                f"{engine_name(base)} was left out: {obstacle.what}, {obstacle.why}; {obstacle.hint}"
            )
    if not tried:
        raise RuleError(
            f"engine {recipe.engine.name} cannot run on {draft.world_size} ranks",
            "no stack is left to choose from", "set engine.name: auto",
        )  # fmt: skip
    fitting = [t for t in tried if t.best is not None]
    if fitting:
        first = min(fitting, key=_rank)
        missing = tuple(text for rule, text in barred.items() if rule in _PACKAGES)
        assert first.best is not None
        return Chosen(first.best, _why(tried, first, offer), "the fastest that fits", missing)
    smallest = min((t for t in tried if t.host_fits), key=lambda t: t.least_bytes, default=tried[0])
    why = f"needs the least memory, {format_bytes(smallest.least_bytes)} {_of(offer)}"
    notes = (*barred.values(), *_disk_would_do(recipe, shape, offer, draft, batch, where))
    return Chosen(smallest.least, why, "needs the least memory (and does not surely fit)", notes)


_PACKAGES = ("packages_are_there", "packages_are_new_enough")


def _rank(one: _Tried) -> tuple[int, int, float]:
    """As `shardwise plan` ranks options of one method on one offer."""
    return bucket(one.best_seconds), simplicity(one.least), one.best_seconds


def _offloads(stack: Stack) -> bool:
    return stack.offload_optimizer != "none" or stack.offload_parameters != "none"


def _disk_would_do(
    recipe: Recipe, shape: ModelShape, offer: Offer, draft: Stack, batch: int, where: Situation | None
) -> Iterator[str]:
    """A note where only ZeRO-Infinity would fit, which needs a folder that only a person can name."""
    deep = recipe.engine.deepspeed
    if recipe.engine.name != "auto" or draft.device != "cuda" or deep.nvme_path is not None:
        return
    stack = _zero(recipe, draft, "zero3", "nvme", "nvme")
    named = recipe.engine.model_copy(update={"deepspeed": deep.model_copy(update={"nvme_path": "nvme"})})
    if _obstacle(recipe.model_copy(update={"engine": named}), shape, stack, where) is not None:
        return
    if _try(recipe, shape, offer, stack, batch).best is not None:
        yield "ZeRO-3 + all on nvme would fit: set engine.deepspeed.nvme_path to a folder on the NVMe disk"


def shardings(recipe: Recipe, draft: Stack) -> Iterator[Stack]:
    """Stacks of the engine that is asked for, or of all that `auto` may choose, simplest first.

    What a person wrote in the section of an engine holds also when its name is left open.
    """
    name, ranks = recipe.engine.name, draft.world_size
    if name == "single" or (name == "auto" and ranks == 1):
        yield replace(draft, sharding="single")
    if name == "ddp":
        yield replace(draft, sharding="ddp")
    if name == "fsdp2":
        yield _fsdp2(recipe, draft, "cpu" if recipe.engine.fsdp2.cpu_offload else "none")
    if name == "deepspeed":
        deep = recipe.engine.deepspeed
        yield _zero(recipe, draft, f"zero{deep.zero_stage}", deep.offload_optimizer, deep.offload_parameters)
    if name != "auto":
        return
    kinds = _SPLIT if ranks > 1 else ()
    if draft.device == "cuda":  # elsewhere the host's memory is the device's
        kinds += _OFFLOADED
    for sharding, states, weights in kinds:
        if not _agrees(recipe, sharding, states, weights):
            continue
        if sharding == "ddp":
            yield replace(draft, sharding="ddp")
        elif sharding == "fsdp2":
            if ranks > 1:
                yield _fsdp2(recipe, draft, weights)
        elif recipe.method == "full" or (states == "none") == (
            weights == "none"
        ):  # adapters' states are small
            yield _zero(recipe, draft, sharding, states, weights)


def candidates(recipe: Recipe, base: Stack, batch: int) -> Iterator[Stack]:
    """Every micro-batch and kind of checkpointing of one sharding that leaves the person's keys as they are.

    A number of layers is among them only where it was asked for.
    """
    asked, kind = recipe.training.micro_batch_size, recipe.training.activation_checkpointing
    per_rank = batch // base.world_size
    micros = [asked] if asked != "auto" else [m for m in range(1, 65) if per_rank % m == 0]
    kinds: tuple[Any, ...] = ("none", "selective", "full") if kind == "auto" else (kind,)
    for micro in micros:
        for checkpointing in kinds:
            yield replace(
                base,
                micro_batch_size=micro,
                gradient_accumulation_steps=max(1, batch // (micro * base.world_size)),
                activation_checkpointing=checkpointing,
            )


def engine_section(recipe: Recipe, stack: Stack) -> dict[str, Any]:
    """The recipe's `engine` as this stack has it, for `Recipe.model_copy`-like updates."""
    section: dict[str, Any] = {
        "name": "deepspeed" if stack.sharding.startswith("zero") else stack.sharding,
        "device": stack.device,
        "processes": stack.world_size,
        "deepspeed": _buckets(recipe, stack),
    }
    if stack.sharding.startswith("zero"):
        section["deepspeed"] |= {
            "zero_stage": int(stack.sharding[-1]),
            "offload_optimizer": stack.offload_optimizer,
            "offload_parameters": stack.offload_parameters,
        }
    elif stack.sharding == "fsdp2":
        section["fsdp2"] = {"cpu_offload": stack.offload_parameters == "cpu"}
    return section


def _agrees(recipe: Recipe, sharding: str, states: Place, weights: Place) -> bool:
    """Whether a kind is what the sections of the engines say, as far as a person wrote something there."""
    fsdp, deep = recipe.engine.fsdp2, recipe.engine.deepspeed
    if sharding == "fsdp2":
        return "cpu_offload" not in fsdp.model_fields_set or fsdp.cpu_offload == (weights == "cpu")
    if not sharding.startswith("zero"):
        return True
    if states == "nvme" and deep.nvme_path is None:
        return False
    ours = {"zero_stage": int(sharding[-1]), "offload_optimizer": states, "offload_parameters": weights}
    return all(getattr(deep, key) == value for key, value in ours.items() if key in deep.model_fields_set)


def _fsdp2(recipe: Recipe, draft: Stack, offload: Place) -> Stack:
    section = recipe.engine.fsdp2
    return replace(
        draft,
        sharding="fsdp2",
        dp_replicate=section.dp_replicate,
        reshard_after_forward=section.reshard_after_forward,
        offload_optimizer=offload,
        offload_parameters=offload,
    )


_SIZES = (
    "reduce_bucket_size",
    "allgather_bucket_size",
    "prefetch_bucket_size",
    "param_persistence_threshold",
    "max_live_parameters",
)


def _zero(recipe: Recipe, draft: Stack, sharding: str, states: Place, weights: Place) -> Stack:
    section = recipe.engine.deepspeed
    sizes = {key: getattr(section, key) for key in _SIZES if getattr(section, key) != "auto"}
    return replace(
        draft,
        sharding=sharding,  # type: ignore[arg-type]
        offload_optimizer=states,
        offload_parameters=weights,
        **sizes,
    )


def _buckets(recipe: Recipe, stack: Stack) -> dict[str, Any]:
    section = recipe.engine.deepspeed
    return {name: getattr(stack, name) for name in _SIZES if getattr(section, name) == "auto"}


def _obstacle(recipe: Recipe, shape: ModelShape, base: Stack, where: Situation | None) -> Problem | None:
    """Why a sharding is not legal for this recipe, beyond what keeps it from running on any engine."""
    where = where or Situation()
    section = engine_section(recipe, base)
    engine = recipe.engine.model_copy(
        update={
            "name": section["name"],
            "fsdp2": recipe.engine.fsdp2.model_copy(update=section.get("fsdp2", {})),
            "deepspeed": recipe.engine.deepspeed.model_copy(update=section["deepspeed"]),
        }
    )
    anyway = {p.rule for p in problems(recipe, shape, where)}
    found = problems(recipe.model_copy(update={"engine": engine}), shape, where)
    return next((p for p in found if p.rule not in anyway), None)


def _try(recipe: Recipe, shape: ModelShape, offer: Offer, base: Stack, batch: int) -> _Tried:
    found: _Tried | None = None
    for stack in candidates(recipe, base, batch):
        found = _compared(found, shape, offer, stack)
        if stack.activation_checkpointing != "none" or recipe.training.activation_checkpointing != "auto":
            continue
        if (some := _some_layers(shape, offer, stack)) is not None:
            found = _compared(found, shape, offer, some)
    assert found is not None
    return found


def _compared(found: _Tried | None, shape: ModelShape, offer: Offer, stack: Stack) -> _Tried:
    """What was found so far, and `stack` in its place where it needs less or is faster by what counts."""
    memory = estimate_memory(shape, stack)
    needed = memory.needed_bytes
    host = not host_problem(shape, stack, offer, memory)
    if found is None or needed < found.least_bytes:
        kept = (found.best_seconds, found.best) if found is not None else (float("inf"), None)
        found = _Tried(needed, stack, host, *kept)
    if host and verdict(memory, offer.gpu.usable_bytes) == "fits":
        seconds = estimate_speed(shape, offer.gpu, stack).step_seconds
        if seconds < 0.97 * found.best_seconds:
            found.best_seconds, found.best = seconds, stack
    return found


def _some_layers(shape: ModelShape, offer: Offer, stack: Stack) -> Stack | None:
    """`stack`, which recomputes nothing, with as few layers recomputed as fit; None: it fits, or none helps."""

    def needs(count: int) -> int:
        tried = replace(stack, activation_checkpointing=count or "none")
        return estimate_memory(shape, tried).most_needed_bytes

    limit = offer.gpu.usable_bytes
    count = None if needs(0) <= limit else least_layers(shape.num_hidden_layers, needs, limit)
    if count is None:
        return None
    return replace(stack, activation_checkpointing=none_too_many(count, needs, limit))


def _of(offer: Offer) -> str:
    return f"of {format_bytes(offer.gpu.usable_bytes)}"


def _why(tried: list[_Tried], best: _Tried, offer: Offer) -> str:
    """The chosen engine against the simpler ones before it."""
    stack = best.best
    assert stack is not None
    simpler = [t for t in tried if simplicity(t.least) < simplicity(stack)]
    if not simpler:
        return {"single": "one rank, and it fits", "ddp": "every rank can hold a copy"}.get(
            stack.sharding, "the fastest that fits"
        )
    too_large = [t for t in simpler if t.best is None]
    slower = [t for t in simpler if t.best is not None]
    told = []
    if too_large:
        nearest = min(too_large, key=lambda t: t.least_bytes)
        least = (
            f"{engine_name(nearest.least)} needs at least {format_bytes(nearest.least_bytes)} {_of(offer)}"
        )
        if not nearest.host_fits:
            least += " and more of the host than there is"
        elif nearest.least_bytes <= offer.gpu.usable_bytes:
            least += ", too close to be sure"
        told.append(least)
    if slower:
        other = min(slower, key=lambda t: simplicity(t.least))
        ratio = other.best_seconds / best.best_seconds
        faster = f"{ratio - 1:.0%} faster than" if ratio < 2 else f"{ratio:.1f} times as fast as"
        told.append(f"{faster} {engine_name(other.least)}")
    else:
        told.append("the simplest that fits")
    return "; ".join(told)
