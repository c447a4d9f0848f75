"""Estimates against measured runs: every usable row of a table, estimated again and compared like with like."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import ceil
from statistics import median

from shardwise.estimate.memory.measured import row_memory
from shardwise.estimate.speed import estimate_speed
from shardwise.plan.rows import Row

# An out-of-memory row may not be called a fit with more than this share of the card left free.
OOM_HEAD_ROOM = 0.05


@dataclass(frozen=True, slots=True)
class Compared:
    """One row: measured against estimated, with the range printed for it. `error` = estimated / measured - 1."""

    row: Row
    measured: float
    estimated: float
    low: float
    high: float

    @property
    def error(self) -> float:
        return self.estimated / self.measured - 1

    @property
    def covered(self) -> bool:
        return self.low <= self.measured <= self.high


@dataclass(frozen=True, slots=True)
class OutOfMemory:
    """A run that went out of memory: what the estimate says of the same stack."""

    row: Row
    needed: float
    capacity: float

    @property
    def passed(self) -> bool:
        """Not called a fit with more than 5 % head-room."""
        return self.needed > (1 - OOM_HEAD_ROOM) * self.capacity


@dataclass(frozen=True, slots=True)
class Score:
    """Errors of one kind of estimate over a table. Fractions; None where nothing was scored."""

    compared: tuple[Compared, ...]
    declined: tuple[tuple[Row, str], ...]
    out_of_memory: tuple[OutOfMemory, ...] = ()

    @property
    def median_signed(self) -> float | None:
        return median(c.error for c in self.compared) if self.compared else None

    @property
    def median_absolute(self) -> float | None:
        return median(abs(c.error) for c in self.compared) if self.compared else None

    @property
    def p90_absolute(self) -> float | None:
        return percentile90([abs(c.error) for c in self.compared]) if self.compared else None

    @property
    def range_coverage(self) -> float | None:
        return sum(c.covered for c in self.compared) / len(self.compared) if self.compared else None

    def reasons(self) -> Counter[str]:
        return Counter(reason for _, reason in self.declined)

    def by(self, key: Callable[[Row], str]) -> dict[str, "Score"]:
        """The same score over groups of rows."""
        groups: dict[str, list[Compared]] = defaultdict(list)
        for compared in self.compared:
            groups[key(compared.row)].append(compared)
        return {name: Score(tuple(rows), ()) for name, rows in sorted(groups.items())}


def percentile90(values: Sequence[float]) -> float:
    """The value that nine of ten do not exceed (nearest rank)."""
    ordered = sorted(values)
    return ordered[max(0, ceil(0.9 * len(ordered)) - 1)]


def score_memory(rows: Iterable[Row]) -> Score:
    """Peak memory: allocated against allocated, reserved against reserved, nvidia-smi against all of it."""
    compared: list[Compared] = []
    declined: list[tuple[Row, str]] = []
    oom: list[OutOfMemory] = []
    for row in rows:
        bound = row.memory_usable == "bound" or row.out_of_memory
        if not bound and (row.memory_usable != "yes" or row.measured_bytes is None):
            continue
        if row.stack is None:
            declined.append((row, row.declined))
            continue
        answer = row_memory(row.raw, row.shape, row.stack)
        if isinstance(answer, str):
            declined.append((row, answer))
            continue
        estimate, size = answer
        if bound:
            if row.gpu is not None:
                oom.append(OutOfMemory(row, size, row.gpu.usable_bytes))
            continue
        assert row.measured_bytes is not None
        share = size / max(1, estimate.allocated_bytes)
        compared.append(
            Compared(row, row.measured_bytes, size, share * estimate.low_bytes, share * estimate.high_bytes)
        )
    return Score(tuple(compared), tuple(declined), tuple(oom))


def score_throughput(rows: Iterable[Row]) -> Score:
    """Tokens per second and GPU."""
    compared: list[Compared] = []
    declined: list[tuple[Row, str]] = []
    for row in rows:
        measured = row.tokens_per_second_per_gpu
        if row.throughput_usable != "yes" or not measured:
            continue
        if row.declined or row.shape is None or row.gpu is None or row.stack is None:
            declined.append((row, row.declined))
            continue
        e = estimate_speed(row.shape, row.gpu, row.stack, row.program)
        compared.append(
            Compared(
                row, measured, e.tokens_per_second_per_gpu,
                e.low_tokens_per_second_per_gpu, e.high_tokens_per_second_per_gpu,
            )
        )  # fmt: skip
    return Score(tuple(compared), tuple(declined))
