"""How few GPUs hold a method, what does not fit, and the smallest change after which it does."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import lru_cache

from shardwise.estimate.memory.formula import estimate_memory
from shardwise.estimate.memory.terms import MemoryEstimate
from shardwise.estimate.stack import Stack
from shardwise.facts.gpus import Gpu, Offer, catalogue
from shardwise.facts.model import ModelShape
from shardwise.plan.model import host_problem, verdict
from shardwise.plan.question import COUNTS, METHODS, Least, Option, Question, Rejected, engine_name


@lru_cache(maxsize=65536)
def memory_of(key: "ById", stack: Stack) -> MemoryEstimate:
    return estimate_memory(key.shape, stack)


class ById:
    """A shape as a cache key, compared by identity."""

    __slots__ = ("shape",)

    def __init__(self, shape: ModelShape) -> None:
        self.shape = shape

    def __hash__(self) -> int:
        return id(self.shape)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ById) and other.shape is self.shape


def least_possible_bytes(shape: ModelShape, method: str, sharding: str, shards: int) -> float:
    """Bytes of one rank that no stack of the method and sharding goes below, nothing offloaded."""
    whole = sharding not in ("fsdp2", "zero3")
    if method == "qlora":
        return 0.5 * shape.quantised_parameters / (1 if whole else shards)
    weights = 2.0 * shape.total_parameters / (1 if whole else shards)
    if method != "full":
        return weights
    split = sharding not in ("single", "ddp")  # gradients, or what is kept of them
    return weights + 2.0 * shape.total_parameters / (shards if split else 1)


def least_gpus(question: Question) -> Iterator[Least]:
    """Fewest GPUs of each kind in question that hold each method, nothing offloaded, micro-batch 1."""
    if question.offers:
        gpus = list({o.gpu.name: o.gpu for o in question.offers if o.gpu.kind == "cuda"}.values())
    else:
        gpus = [g for g in catalogue().values() if question.prices.rent(g) is not None]
    key = ById(question.shape)
    for gpu in gpus:
        for method in question.methods:
            yield Least(gpu.name, method, _fewest(question, key, gpu, method))


def _fewest(question: Question, key: ById, gpu: Gpu, method: str) -> int | None:
    for count in COUNTS:
        if count > gpu.gpus_per_node and gpu.form == "desktop":
            return None
        if least_possible_bytes(question.shape, method, "fsdp2", count) > gpu.usable_bytes:
            continue
        per_node = min(count, gpu.gpus_per_node)
        stack = Stack(
            method=method,  # type: ignore[arg-type]
            sharding="single" if count == 1 else "fsdp2",
            world_size=count,
            gpus_per_node=per_node,
            sequence_length=question.sequence_length,
            precision="bf16" if gpu.has_bf16 else "fp32",
            master_weights=question.master_weights,
            activation_checkpointing="full",
            lora_rank=question.lora_rank,
            lora_targets=question.lora_targets,
        )
        if verdict(memory_of(key, stack), gpu.usable_bytes) == "fits":
            return count
    return None


def rejections(
    question: Question,
    method: str,
    offer: Offer,
    best: Iterable[Option],
    smallest: dict[str, tuple[int, Stack]],
) -> list[Rejected]:
    """Engines of which no stack fits; where nothing of the method fits, the nearest one says what would help."""
    fitting = {engine_name(o.plan.stack) for o in best}
    capacity = offer.gpu.usable_bytes
    found: list[Rejected] = []
    for engine, (needed, stack) in sorted(smallest.items(), key=lambda item: item[1][0]):
        if engine in fitting:
            continue
        host = host_problem(question.shape, stack, offer, memory_of(ById(question.shape), stack))
        reason = (
            "needs more than one device holds" if needed > capacity else f"the host cannot hold it: {host}"
        )
        changes: tuple[str, ...] = ()
        if not fitting and not any(r.changes for r in found):
            changes = tuple(changes_that_fit(question, offer, stack))
        found.append(Rejected(method, engine, offer, needed, capacity, reason, changes, stack))
    return found


def changes_that_fit(question: Question, offer: Offer, stack: Stack) -> Iterator[str]:
    """Single changes to a stack that does not fit after which it would, smallest first."""
    key, capacity = ById(question.shape), offer.gpu.usable_bytes
    smallest = replace(stack, micro_batch_size=1, activation_checkpointing="full")

    def fits(changed: Stack) -> bool:
        memory = memory_of(key, changed)
        fitting = verdict(memory, capacity) == "fits"
        return fitting and not host_problem(question.shape, changed, offer, memory)

    stack = smallest
    if stack.method == "full" and stack.master_weights and fits(replace(stack, master_weights=False)):
        yield "--no-master-weights"
    length = stack.sequence_length
    while length > 256:
        length //= 2
        if fits(replace(stack, sequence_length=length)):
            yield f"--sequence-length {length}"
            break
    for method in METHODS[METHODS.index(stack.method) + 1 :]:
        sharding = stack.sharding
        if method == "qlora" and sharding.startswith("zero"):
            sharding = "fsdp2" if stack.world_size > 1 else "single"
        if fits(replace(stack, method=method, sharding=sharding)):  # type: ignore[arg-type]
            yield f"--method {method}"
            break
    count = _fewest(question, key, offer.gpu, stack.method)
    if count is not None and count > offer.count:
        yield f"--gpus {count}x{offer.gpu.name}"
    bigger = [
        gpu
        for gpu in catalogue().values()
        if gpu.usable_bytes > capacity
        and gpu.vendor == "nvidia"
        and _fewest(question, key, gpu, stack.method) == offer.count
    ]
    if bigger:
        gpu = min(bigger, key=lambda g: g.usable_bytes)
        yield f"--gpus {offer.count}x{gpu.name}"
