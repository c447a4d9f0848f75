"""What a plan says: one decided stack on one offer, its estimates, and the reason for every choice."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from shardwise.estimate.memory.host import PROCESS_BYTES
from shardwise.estimate.memory.states import held
from shardwise.estimate.memory.terms import MemoryEstimate
from shardwise.estimate.memory.trainer import OURS
from shardwise.estimate.speed import SpeedEstimate
from shardwise.estimate.stack import Stack
from shardwise.facts.gpus import Offer
from shardwise.facts.model import ModelShape
from shardwise.units import format_bytes

HOST_SHARE = 0.9  # of a node's memory that offloaded states and processes may take
Verdict = Literal["fits", "tight", "does not fit"]


@dataclass(frozen=True, slots=True)
class DataFacts:
    """What a plan knows about the training rows. Counts are of one epoch; None: not known.

    `sequences_at(length)` is the exact number of packed sequences of that length, where the rows were read;
    `labelled_at(length, global batch, micro-batch, ranks)` most tokens with a label in one micro-batch.
    `steps_at(length, global batch)` is the trainer's own count of the run's optimizer steps; `held_out` the number
    of rows that were set aside, where the recipe left it open. `labelled_share` is that of tokens with a label,
    `document_tokens` the length of the row that a token lies in, on average over tokens.
    """

    tokens: int | None = None
    rows: int | None = None
    longest_tokens: int | None = None
    sequences_at: Callable[[int], int] | None = None
    labelled_at: Callable[[int, int, int, int], int] | None = None
    steps_at: Callable[[int, int], int] | None = None
    held_out: int | None = None
    labelled_share: float = 1.0
    document_tokens: float | None = None
    name: str = ""

    def sequences(self, sequence_length: int) -> int | None:
        """Packed sequences of one epoch: counted where possible, else tokens over length (full packing)."""
        if self.sequences_at is not None:
            return self.sequences_at(sequence_length)
        if self.tokens is None:
            return None
        return max(1, -(-self.tokens // sequence_length))


@dataclass(frozen=True, slots=True)
class Choice:
    """One thing that was decided: the recipe's key, the value and why."""

    key: str
    value: str
    why: str


@dataclass(frozen=True, slots=True)
class Plan:
    """A stack on an offer, with what it takes. `steps` and `seconds` are None when the data is not known."""

    shape: ModelShape
    offer: Offer
    stack: Stack
    memory: MemoryEstimate
    speed: SpeedEstimate
    capacity_bytes: int  # usable memory of one device
    steps: int | None = None
    fill: float = 1.0  # share of a sequence's length that holds tokens, the mean over the data
    choices: tuple[Choice, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def needed_bytes(self) -> int:
        """What one device must hold: live tensors and what the process takes beside them."""
        return self.memory.needed_bytes

    @property
    def head_room(self) -> float:
        """Share of the device's memory that stays free; negative when it does not fit."""
        return 1 - self.needed_bytes / self.capacity_bytes

    @property
    def host_fits(self) -> bool:
        """Offloaded states must fit the host for good; weights that are only loaded through it are mapped files."""
        return not host_problem(self.shape, self.stack, self.offer, self.memory)

    @property
    def verdict(self) -> Verdict:
        return verdict(self.memory, self.capacity_bytes) if self.host_fits else "does not fit"

    @property
    def seconds(self) -> float | None:
        """Time of all optimizer steps; loading, evaluation and saving come on top."""
        return None if self.steps is None else self.steps * self.speed.step_seconds * self._filled

    @property
    def low_seconds(self) -> float | None:
        return None if self.steps is None else self.steps * self.speed.low_seconds * self._filled

    @property
    def high_seconds(self) -> float | None:
        return None if self.steps is None else self.steps * self.speed.high_seconds * self._filled

    @property
    def _filled(self) -> float:
        """A step's time against that of full sequences: what does not depend on tokens stays."""
        fixed = sum(
            p.seconds for p in self.speed.parts if p.name in ("communication", "optimizer", "offload")
        )
        share = fixed / self.speed.step_seconds
        return share + (1 - share) * self.fill


def host_holds(shape: ModelShape, stack: Stack, offer: Offer) -> bool:
    """Whether a node's memory holds what its ranks offload, their processes, and a tenth to spare."""
    return _offloaded_bytes(shape, stack) <= HOST_SHARE * offer.host_bytes_per_node


def disk_holds(memory: MemoryEstimate, offer: Offer) -> bool:
    """Whether a node's own disk holds the model, checkpoints and what is offloaded there."""
    return memory.disk_bytes_per_node <= offer.gpu.disk_bytes


def _offloaded_bytes(shape: ModelShape, stack: Stack) -> int:
    """Of one node."""
    ranks = min(stack.gpus_per_node, stack.world_size)
    states = held(shape, stack, OURS)
    return ranks * (states.host + states.paged + PROCESS_BYTES)


def host_problem(shape: ModelShape, stack: Stack, offer: Offer, memory: MemoryEstimate) -> str:
    """What a node's host cannot hold of what is offloaded, with the numbers; empty when it can."""
    if stack.offload_optimizer == "none" and stack.offload_parameters == "none" and not memory.paged_bytes:
        return ""
    if not host_holds(shape, stack, offer):
        needed, whole = _offloaded_bytes(shape, stack), offer.host_bytes_per_node
        return (
            f"{format_bytes(needed)} of host memory per node, of {format_bytes(whole)} with a tenth to spare"
        )
    if "nvme" in (stack.offload_optimizer, stack.offload_parameters) and not disk_holds(memory, offer):
        return (
            f"{format_bytes(memory.disk_bytes_per_node)} of disk per node, of "
            f"{format_bytes(offer.gpu.disk_bytes)}"
        )
    return ""


def verdict(memory: MemoryEstimate, capacity_bytes: int) -> Verdict:
    """fits: the upper bound of the estimate fits. tight: only the estimate itself does."""
    if memory.most_needed_bytes <= capacity_bytes:
        return "fits"
    if memory.needed_bytes <= capacity_bytes:
        return "tight"
    return "does not fit"


def fill_of(data: DataFacts, sequence_length: int) -> float:
    """Share of the packed sequences' length that holds tokens; 1 where it is not known."""
    sequences = data.sequences(sequence_length)
    if data.tokens is None or not sequences:
        return 1.0
    return min(1.0, data.tokens / (sequences * sequence_length))


def planned_steps(
    sequences: int | None,
    global_batch_size: int,
    epochs: float | None,
    max_steps: int | None,
    max_sequences: int | None = None,
) -> int | None:
    """Optimizer steps of a run: `max_steps`, or whole batches and a last smaller one in every epoch.

    `max_sequences`: a budget in tokens, in full sequences. What a run with its rows at hand counts exactly
    (`DataFacts.steps_at`) is counted here from the number of sequences alone.
    """
    if max_steps is not None:
        return max_steps
    if max_sequences is not None and sequences is None:
        return max(1, -(-max_sequences // global_batch_size))
    if sequences is None:
        return None
    passes = (epochs or 1.0) if max_sequences is None else max_sequences / sequences
    whole = int(passes + 1e-9)
    rest = max(0, -(-int((passes - whole) * sequences + 0.999999) // global_batch_size))
    return max(1, whole * -(-sequences // global_batch_size) + rest)
