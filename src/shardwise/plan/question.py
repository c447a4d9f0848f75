"""What is asked of a search, and what it answers."""

from dataclasses import dataclass, field
from math import log

from shardwise.errors import RuleError, unknown_name
from shardwise.estimate.cost import Cost
from shardwise.estimate.stack import Checkpointing, Stack
from shardwise.facts.gpus import Offer, Prices
from shardwise.facts.model import ModelShape
from shardwise.plan.model import DataFacts, Plan

CHECKPOINTING: tuple[Checkpointing, ...] = ("none", "selective", "full")
METHODS = ("full", "lora", "qlora")  # most to least of what a model can be taught
COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked. `offers` empty: the catalogue is searched, and each offer answers with its best engine only.

    `best_only`: so it does for `offers` too.
    """

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
    goal: str = "steer"  # what the model knows (style, format, tasks); "teach": change what it knows
    lora_rank: int = 16
    lora_targets: str | tuple[str, ...] = "all-linear"
    master_weights: bool = True
    most_gpus: int = 64
    micro_batch_size: int | None = None  # only this one
    activation_checkpointing: Checkpointing | None = None  # only this kind, or this number of layers
    best_only: bool = False


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
        stack = self.plan.stack
        engine = "" if stack.sharding == "single" else f" {engine_name(stack)}"
        return f"{stack.method}{engine} on {self.plan.offer.name}"


@dataclass(frozen=True, slots=True)
class Rejected:
    """An engine of which no stack of a method fits: what the smallest needs, and what would make it fit.

    `changes` are filled in where nothing of the method fits the offer, on the entry that comes nearest.
    """

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


def checkpointing_of(text: str, shape: ModelShape) -> Checkpointing | None:
    """A kind by its name, a number of layers, or nothing. Raises UnknownNameError; RuleError for too many layers."""
    if not text:
        return None
    if not (text.isascii() and text.isdecimal() and int(text)):
        return _kind(text)
    if int(text) > shape.num_hidden_layers:
        raise RuleError(
            f"activation checkpointing of {text} layers on a model of {shape.num_hidden_layers}",
            "there are not so many to recompute",
            f"give a number up to {shape.num_hidden_layers}, or full",
        )
    return int(text)


def _kind(name: str) -> Checkpointing:
    for kind in CHECKPOINTING:
        if kind == name:
            return kind
    raise unknown_name("checkpointing", name, [*map(str, CHECKPOINTING), "a number of layers"])


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


def bucket(value: float) -> int:
    """Values within about 3 % count as equal: estimates are no finer."""
    return round(log(value) / log(1.03)) if value > 0 else 0


def simplicity(stack: Stack) -> int:
    """The lower, the simpler: of two engines as fast as each other the one to take."""
    order = ("single", "ddp", "fsdp2", "zero1", "zero2", "zero3")
    return order.index(stack.sharding) + (10 if stack.offload_optimizer != "none" else 0)
