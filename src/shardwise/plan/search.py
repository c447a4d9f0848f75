"""Which stack on which GPUs: enumerate, estimate, keep what fits, rank, and say why the rest does not."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import log
from typing import Any

from shardwise.estimate.cost import Cost, energy_kwh, estimate_cost
from shardwise.estimate.memory.formula import estimate_memory
from shardwise.estimate.memory.terms import MemoryEstimate
from shardwise.estimate.speed import estimate_speed
from shardwise.estimate.stack import Stack
from shardwise.facts.gpus import Offer, Prices, catalogue
from shardwise.facts.model import ModelShape
from shardwise.plan.model import DataFacts, Plan, planned_steps, verdict
from shardwise.plan.resolve import ADAPTER_TOKENS, CPU_TOKENS, FEWEST_STEPS, FULL_TOKENS

METHODS = ("full", "lora", "qlora")  # most to least of what a model can be taught
MICROS = (1, 2, 4, 8, 16, 32)
CHECKPOINTING = ("none", "selective", "full")
COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
START_SECONDS = 60.0  # processes, libraries, kernels


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked. `offers` empty: the catalogue is searched."""

    shape: ModelShape
    prices: Prices
    data: DataFacts = field(default_factory=DataFacts)
    epochs: float = 1.0
    methods: tuple[str, ...] = METHODS
    offers: tuple[Offer, ...] = ()
    sequence_length: int = 2048
    global_batch_size: int | None = None
    budget_usd: float | None = None
    deadline_seconds: float | None = None
    buy: bool = False
    lora_rank: int = 16
    lora_targets: str | tuple[str, ...] = "all-linear"
    master_weights: bool = True
    most_gpus: int = 64
    micro_batch_size: int | None = None  # only this one
    activation_checkpointing: str | None = None  # only this kind


@dataclass(frozen=True, slots=True)
class Option:
    """A plan with its price and its whole time, loading included. Costs are None without data or price."""

    plan: Plan
    cost: Cost | None
    seconds: float | None
    low_seconds: float | None
    high_seconds: float | None
    energy_kwh: float | None
    missed: str = ""  # the wish it does not meet

    @property
    def label(self) -> str:
        return f"{self.plan.stack.method} {engine_name(self.plan.stack)} on {self.plan.offer.name}"


@dataclass(frozen=True, slots=True)
class Rejected:
    """A family of stacks of which none fits: what the smallest needs, and what would make it fit."""

    method: str
    engine: str
    offer: Offer
    needed_bytes: int
    capacity_bytes: int
    reason: str
    changes: tuple[str, ...]
    stack: Stack  # the smallest


@dataclass(frozen=True, slots=True)
class Least:
    """The fewest GPUs of a kind that hold a method, without offload."""

    gpu: str
    method: str
    count: int | None


@dataclass(frozen=True, slots=True)
class Answer:
    question: Question
    options: tuple[Option, ...]  # best first
    front: tuple[Option, ...]  # of time against cost
    recommended: Option | None
    rejected: tuple[Rejected, ...]
    least: tuple[Least, ...]
    tried: int
    notes: tuple[str, ...] = ()


def engine_name(stack: Stack) -> str:
    """'fsdp2', 'zero3 + cpu offload' ... as tables show it."""
    name = stack.sharding.replace("zero", "ZeRO-")
    if stack.dp_replicate > 1:
        name = f"fsdp2 x {stack.dp_replicate} replicas"
    places = [p for p in (stack.offload_optimizer, stack.offload_parameters) if p != "none"]
    if not places:
        return name
    what = "all" if stack.offload_parameters != "none" else "optimizer"
    return f"{name} + {what} on {places[0]}"


def stacks_for(question: Question, method: str, offer: Offer) -> Iterator[Stack]:
    """Every stack of a method on an offer: engine and stage x offload x checkpointing x micro-batch."""
    ranks = offer.count
    batch = global_batch(question, method, offer)
    per_rank = batch // ranks
    for base in _shardings(question, method, offer):
        for checkpointing in _asked(question.activation_checkpointing, CHECKPOINTING):
            for micro in _asked(question.micro_batch_size, MICROS):
                if per_rank % micro == 0:
                    yield replace(
                        base,
                        micro_batch_size=micro,
                        gradient_accumulation_steps=per_rank // micro,
                        activation_checkpointing=checkpointing,
                    )


def _asked(only: Any, every: tuple[Any, ...]) -> tuple[Any, ...]:
    return every if only is None else (only,)


def global_batch(question: Question, method: str, offer: Offer) -> int:
    """Sequences per step: what was asked, else about the usual number of tokens; a multiple of the ranks."""
    ranks = offer.count
    if question.global_batch_size is not None:
        return max(ranks, question.global_batch_size // ranks * ranks)
    aim = CPU_TOKENS if offer.gpu.kind != "cuda" else FULL_TOKENS if method == "full" else ADAPTER_TOKENS
    wanted = max(1, aim // question.sequence_length)
    sequences = question.data.sequences(question.sequence_length)
    if sequences is not None:
        wanted = max(1, min(wanted, sequences // FEWEST_STEPS))
    per_rank = max(1, wanted // ranks)
    per_rank = 1 << (per_rank.bit_length() - 1)  # a power of two, so that micro-batches divide it
    if question.micro_batch_size is not None:
        per_rank = max(1, per_rank // question.micro_batch_size) * question.micro_batch_size
    return per_rank * ranks


def _shardings(question: Question, method: str, offer: Offer) -> Iterator[Stack]:
    gpu, ranks = offer.gpu, offer.count
    cuda = gpu.kind == "cuda"
    draft = Stack(
        method=method,  # type: ignore[arg-type]
        world_size=ranks,
        gpus_per_node=min(ranks, offer.gpus_per_node),
        sequence_length=question.sequence_length,
        precision="bf16" if gpu.has_bf16 and gpu.kind != "cpu" else "fp32",
        master_weights=question.master_weights,
        lora_rank=question.lora_rank,
        lora_targets=question.lora_targets,
        device=gpu.kind,
    )
    sharded = method != "qlora"  # 4-bit weights under DeepSpeed are not sharded while loading: FSDP2 or DDP
    if ranks == 1:
        yield draft
        if cuda and sharded:
            yield replace(draft, sharding="zero2", offload_optimizer="cpu")
            yield replace(draft, sharding="zero3", offload_optimizer="cpu", offload_parameters="cpu")
            yield replace(draft, sharding="zero3", offload_optimizer="nvme", offload_parameters="nvme")
        return
    yield replace(draft, sharding="ddp")
    yield replace(draft, sharding="fsdp2")
    if offer.nodes > 1:
        yield replace(draft, sharding="fsdp2", dp_replicate=offer.nodes)
    yield replace(draft, sharding="fsdp2", offload_optimizer="cpu", offload_parameters="cpu")
    if sharded:
        yield replace(draft, sharding="zero1")
        yield replace(draft, sharding="zero2")
        yield replace(draft, sharding="zero3")
        yield replace(draft, sharding="zero2", offload_optimizer="cpu")
        yield replace(draft, sharding="zero3", offload_optimizer="cpu", offload_parameters="cpu")


@lru_cache(maxsize=65536)
def _memory(key: "_ById", stack: Stack) -> MemoryEstimate:
    return estimate_memory(key.shape, stack)


class _ById:
    """A shape as a cache key, compared by identity."""

    __slots__ = ("shape",)

    def __init__(self, shape: ModelShape) -> None:
        self.shape = shape

    def __hash__(self) -> int:
        return id(self.shape)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ById) and other.shape is self.shape


def answer(question: Question) -> Answer:
    """Search the offers (or the catalogue) and rank what fits."""
    offers = question.offers or tuple(catalogue_offers(question))
    options: list[Option] = []
    rejected: list[Rejected] = []
    tried = 0
    for offer in offers:
        for method in question.methods:
            best, smallest, count = _best_of(question, method, offer)
            tried += count
            options += best
            if question.offers:
                rejected += _rejections(question, method, offer, best, smallest)
    options = [_with_wish(question, o) for o in options]
    ranked = sorted(options, key=lambda o: _rank(question, o))
    return Answer(
        question=question,
        options=tuple(ranked),
        front=pareto(ranked),
        recommended=next((o for o in ranked if not o.missed), None),
        rejected=tuple(rejected),
        least=tuple(least_gpus(question)),
        tried=tried,
    )


def catalogue_offers(question: Question) -> Iterator[Offer]:
    """Every GPU with a price, in counts that fill cards, hosts and nodes."""
    for gpu in catalogue().values():
        priced = question.prices.own(gpu) if question.buy else question.prices.rent(gpu)
        if priced is None:
            continue
        for count in COUNTS:
            if count > question.most_gpus:
                break
            if count > gpu.gpus_per_node and (count % gpu.gpus_per_node or gpu.form == "desktop"):
                continue
            yield Offer(gpu, count, min(count, gpu.gpus_per_node))


def _best_of(
    question: Question, method: str, offer: Offer
) -> tuple[list[Option], dict[str, tuple[int, Stack]], int]:
    """The fastest fitting stack of every engine; the smallest need of every engine; how many were tried."""
    best: dict[str, Plan] = {}
    smallest: dict[str, tuple[int, Stack]] = {}
    key, capacity, tried = _ById(question.shape), offer.gpu.usable_bytes, 0
    floor = _least_possible(question.shape, method)
    for stack in stacks_for(question, method, offer):
        tried += 1
        engine = engine_name(stack)
        if floor / stack.dp_shard > capacity and stack.offload_parameters == "none":
            smallest.setdefault(engine, (int(floor / stack.dp_shard), stack))
            continue
        memory = _memory(key, stack)
        needed = memory.allocated_bytes + memory.fixed_bytes
        if engine not in smallest or needed < smallest[engine][0]:
            smallest[engine] = needed, stack
        if verdict(memory, capacity) == "does not fit":
            continue
        speed = estimate_speed(question.shape, offer.gpu, stack)
        plan = Plan(question.shape, offer, stack, memory, speed, capacity)
        if not plan.host_fits:
            continue
        other = best.get(engine)
        if other is None or _better(plan, other):
            best[engine] = plan
    return [_option(question, plan) for plan in best.values()], smallest, tried


def _better(plan: Plan, other: Plan) -> bool:
    """A sure fit before a tight one, then the faster."""
    if (plan.verdict == "fits") != (other.verdict == "fits"):
        return plan.verdict == "fits"
    mine, theirs = (p.speed.step_seconds / p.speed.tokens_per_step for p in (plan, other))
    return mine < 0.98 * theirs


def _least_possible(shape: ModelShape, method: str) -> float:
    """Bytes that no stack of the method goes below, over all shards together."""
    if method == "qlora":
        return 0.5 * shape.quantised_parameters
    return (4.0 if method == "full" else 2.0) * shape.total_parameters


def _option(question: Question, plan: Plan) -> Option:
    steps = planned_steps(
        question.data.sequences(question.sequence_length), plan.stack.global_batch_size, question.epochs, None
    )
    plan = replace(plan, steps=steps)
    if steps is None:
        return Option(plan, None, None, None, None, None)
    start = start_seconds(plan)
    seconds = plan.speed.step_seconds * steps + start
    low, high = plan.speed.low_seconds * steps + start, plan.speed.high_seconds * steps + 2 * start
    cost = estimate_cost(plan.offer, seconds, low, high, question.prices, question.buy)
    return Option(plan, cost, seconds, low, high, energy_kwh(plan.offer, seconds))


def start_seconds(plan: Plan) -> float:
    """Start of the processes and reading the weights from disk, each node its own copy."""
    size = 2.0 * plan.shape.total_parameters
    return START_SECONDS + size / plan.offer.gpu.disk_read_bytes_per_second


def _with_wish(question: Question, option: Option) -> Option:
    missed = []
    if question.budget_usd is not None:
        if option.cost is None:
            missed.append("no price is known, so the budget cannot be checked")
        elif option.cost.usd > question.budget_usd:
            missed.append(f"costs ${option.cost.usd:,.0f} of ${question.budget_usd:,.0f}")
    if question.deadline_seconds is not None:
        if option.seconds is None:
            missed.append("without data the deadline cannot be checked")
        elif option.seconds > question.deadline_seconds:
            missed.append(f"takes {option.seconds / question.deadline_seconds:.1f} x the deadline")
    return replace(option, missed="; ".join(missed))


def _rank(question: Question, option: Option) -> tuple[Any, ...]:
    """Wishes met, then sure fits, then quality asked for first, then price (or time where no price is asked)."""
    plan = option.plan
    tight = plan.verdict != "fits"
    per_token = plan.speed.step_seconds / plan.speed.tokens_per_step
    many = len(question.offers) != 1
    money = option.cost.usd if option.cost is not None and many else 0.0
    preferred = _preference(question).index(plan.stack.method)
    return (
        bool(option.missed), tight, preferred, _bucket(money), _bucket(per_token), _simplicity(plan.stack),
        per_token,
    )  # fmt: skip


def _bucket(value: float) -> int:
    """Values within about 3 % count as equal: estimates are no finer."""
    return round(log(value) / log(1.03)) if value > 0 else 0


def _preference(question: Question) -> tuple[str, ...]:
    """Methods in the order recommended: LoRA where nothing else was asked for, else what was asked for first."""
    if question.methods == METHODS:
        return ("lora", "qlora", "full")
    return question.methods + tuple(m for m in METHODS if m not in question.methods)


def _simplicity(stack: Stack) -> int:
    order = ("single", "ddp", "fsdp2", "zero1", "zero2", "zero3")
    return order.index(stack.sharding) + (10 if stack.offload_optimizer != "none" else 0)


def pareto(options: Sequence[Option]) -> tuple[Option, ...]:
    """Options that no other beats in both time and cost; fastest first."""
    known = [o for o in options if o.cost is not None and o.seconds is not None and not o.missed]
    front: list[Option] = []
    for option in sorted(known, key=lambda o: (o.seconds, o.cost.usd if o.cost else 0.0)):
        if not front or option.cost.usd < 0.999 * front[-1].cost.usd:  # type: ignore[union-attr]
            front.append(option)
    return tuple(front)


def least_gpus(question: Question) -> Iterator[Least]:
    """Fewest GPUs of each kind in question that hold each method, nothing offloaded, micro-batch 1."""
    if question.offers:
        gpus = list({o.gpu.name: o.gpu for o in question.offers if o.gpu.kind == "cuda"}.values())
    else:
        gpus = [g for g in catalogue().values() if question.prices.rent(g) is not None]
    key = _ById(question.shape)
    for gpu in gpus:
        for method in question.methods:
            yield Least(gpu.name, method, _fewest(question, key, gpu, method))


def _fewest(question: Question, key: _ById, gpu: Any, method: str) -> int | None:
    floor = _least_possible(question.shape, method)
    for count in COUNTS:
        if count > gpu.gpus_per_node and gpu.form == "desktop":
            return None
        if floor / count > gpu.usable_bytes:
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
        if verdict(_memory(key, stack), gpu.usable_bytes) == "fits":
            return count
    return None


def _rejections(
    question: Question,
    method: str,
    offer: Offer,
    best: Iterable[Option],
    smallest: dict[str, tuple[int, Stack]],
) -> list[Rejected]:
    """Engines of which no stack fits, with the smallest change that makes one fit."""
    fitting = {engine_name(o.plan.stack) for o in best}
    found = []
    for engine, (needed, stack) in smallest.items():
        if engine in fitting:
            continue
        over = needed > offer.gpu.usable_bytes
        reason = "needs more than one device holds" if over else "the host cannot hold what is offloaded"
        changes = changes_that_fit(question, offer, stack) if not fitting else ()
        found.append(
            Rejected(method, engine, offer, needed, offer.gpu.usable_bytes, reason, tuple(changes), stack)
        )
    return found


def changes_that_fit(question: Question, offer: Offer, stack: Stack) -> Iterator[str]:
    """Single changes to a stack that does not fit after which it would, smallest first."""
    key, capacity = _ById(question.shape), offer.gpu.usable_bytes

    def fits(changed: Stack) -> bool:
        return verdict(_memory(key, changed), capacity) == "fits"

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
