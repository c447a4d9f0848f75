"""A plan's answer as rows to draw: bars of memory against the card's line, time against cost."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import log10

from shardwise.estimate.memory.formula import estimate_memory
from shardwise.estimate.memory.terms import MemoryEstimate, MemoryTerm
from shardwise.facts.gpus import Offer
from shardwise.plan.search import Answer, Option, Rejected, engine_name
from shardwise.report.bars import Bar, bar, term_number

FIXED = "context"  # what a process holds beside its tensors
MOST_BARS = 30
MOST_POINTS = 500
CLIPPED = 2.0  # cards: how far a bar that does not fit is drawn


@dataclass(frozen=True)
class StackRow:
    """One stack: its bar, where the card ends on the same scale (percent), and what a table says of it."""

    method: str
    engine: str
    offer: Offer
    micro_batch_size: int
    activation_checkpointing: str
    verdict: str
    needed_bytes: int
    capacity_bytes: int
    memory: MemoryEstimate
    terms: tuple[MemoryTerm, ...]
    bar: Bar
    capacity_percent: float
    clipped: bool  # the bar goes on beyond the drawing
    option: Option | None
    reason: str = ""
    changes: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        return self.method if self.engine == "single" else f"{self.method} with {self.engine}"


def stack_rows(answer: Answer) -> list[StackRow]:
    """What fits, best first, then what does not, the least need first; on one scale."""
    found: list[Option | Rejected] = [
        *_spread(answer.options),
        *sorted(answer.rejected, key=lambda r: r.needed_bytes),
    ]
    found = found[:MOST_BARS]
    needs = [_needed(x) for x in found]
    largest = max((_capacity(x) for x in found), default=1)
    whole = min(max([*needs, 1.1 * largest]), CLIPPED * largest)
    return [_row(answer, x, whole) for x in found]


def term_names(rows: Sequence[StackRow]) -> list[str]:
    """Every term some bar shows, in the order of their numbers."""
    return sorted({t.name for row in rows for t in row.terms}, key=term_number)


def _spread(options: Sequence[Option]) -> list[Option]:
    """Where a catalogue was searched, the best few; every engine of one offer otherwise."""
    offers = {o.plan.offer.name for o in options}
    return list(options) if len(offers) <= 1 else list(options[:12])


def _needed(x: Option | Rejected) -> int:
    return x.plan.needed_bytes if isinstance(x, Option) else x.needed_bytes


def _capacity(x: Option | Rejected) -> int:
    return x.plan.capacity_bytes if isinstance(x, Option) else x.capacity_bytes


def _row(answer: Answer, x: Option | Rejected, whole: float) -> StackRow:
    changes: tuple[str, ...] = ()
    if isinstance(x, Option):
        plan = x.plan
        stack, memory, offer, verdict = plan.stack, plan.memory, plan.offer, plan.verdict
        option, reason = x, x.missed
    else:
        stack, offer, verdict = x.stack, x.offer, "does not fit"
        memory = estimate_memory(answer.question.shape, stack)
        option, reason, changes = None, x.reason if x.reason.startswith("the host") else "", x.changes
    context = MemoryTerm(FIXED, memory.fixed_bytes, "the device's own, libraries, communication buffers")
    terms = (*(t for t in memory.terms if t.bytes), context)
    capacity = _capacity(x)
    return StackRow(
        method=stack.method,
        engine=engine_name(stack),
        offer=offer,
        micro_batch_size=stack.micro_batch_size,
        activation_checkpointing=stack.recomputed,
        verdict=verdict,
        needed_bytes=memory.needed_bytes,
        capacity_bytes=capacity,
        memory=memory,
        terms=terms,
        bar=bar(engine_name(stack), [(t.name, t.bytes) for t in terms], whole),
        capacity_percent=round(100 * capacity / whole, 3),
        clipped=memory.needed_bytes > whole,
        option=option,
        reason=reason,
        changes=changes,
    )


@dataclass(frozen=True)
class Point:
    """An option as a mark; `x` and `y` in percent of the drawing, y from the top."""

    option: Option
    x: float
    y: float
    on_front: bool


@dataclass(frozen=True)
class Tick:
    at: float
    label: str


@dataclass(frozen=True)
class Scatter:
    """Time (x) against cost (y), both logarithmic. `left_out`: options not drawn, for their number."""

    points: tuple[Point, ...]
    front: tuple[Point, ...]
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    left_out: int


def scatter(answer: Answer) -> Scatter | None:
    """None where time or cost of all options is unknown, because no data or no price is."""
    known = [o for o in answer.options if o.seconds and o.cost is not None and o.cost.usd > 0]
    if not known:
        return None
    front = {id(o) for o in answer.front}
    drawn = [o for o in known if id(o) in front]
    kept = drawn + _best_of_each([o for o in known if id(o) not in front])[: max(0, MOST_POINTS - len(drawn))]
    x_range = _range([o.seconds or 1.0 for o in kept])
    y_range = _range([o.cost.usd for o in kept if o.cost is not None])
    points = [
        Point(
            o,
            _place(o.seconds or 1.0, x_range),
            100 - _place(o.cost.usd if o.cost else 1.0, y_range),
            id(o) in front,
        )
        for o in kept
    ]
    points.sort(key=lambda p: p.on_front)  # marks of the front are drawn over the others
    return Scatter(
        points=tuple(points),
        front=tuple(sorted((p for p in points if p.on_front), key=lambda p: p.x)),
        x_ticks=_ticks(x_range, _TIMES, _short_time),
        y_ticks=tuple(Tick(100 - t.at, t.label) for t in _ticks(y_range, _MONEY, _short_usd)),
        left_out=len(known) - len(kept),
    )


def _best_of_each(options: Sequence[Option]) -> list[Option]:
    """In the order given, but one of every method on every offer before the second of any."""
    seen: dict[tuple[str, str], int] = {}
    rounds: list[tuple[int, int, Option]] = []
    for option in options:
        key = (option.plan.stack.method, option.plan.offer.name)
        seen[key] = seen.get(key, 0) + 1
        rounds.append((seen[key], len(rounds), option))
    return [option for _, _, option in sorted(rounds, key=lambda r: r[:2])]


def _range(values: Sequence[float]) -> tuple[float, float]:
    """Logarithms with some air around them."""
    low, high = log10(min(values)), log10(max(values))
    air = max(0.15, (high - low) * 0.08)
    return low - air, high + air


def _place(value: float, span: tuple[float, float]) -> float:
    return round(100 * (log10(value) - span[0]) / (span[1] - span[0]), 2)


_TIMES = (
    1,
    2,
    5,
    10,
    30,
    60,
    120,
    300,
    600,
    1800,
    3600,
    7200,
    18000,
    43200,
    86400,
    172800,
    432000,
    864000,
    2592000,
    8640000,
)
_MONEY = tuple(m * 10.0**e for e in range(-3, 8) for m in (1, 2, 5))


def _ticks(
    span: tuple[float, float], values: Sequence[float], show: Callable[[float], str]
) -> tuple[Tick, ...]:
    """Round values within a span; every second where they would touch."""
    inside = [v for v in values if span[0] <= log10(v) <= span[1]]
    while len(inside) > 7:
        inside = inside[::2]
    return tuple(Tick(_place(v, span), show(v)) for v in inside)


def _short_time(seconds: float) -> str:
    for size, name in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:g} {name}"
    return f"{seconds:g} s"


def _short_usd(usd: float) -> str:
    return f"${usd:,.0f}" if usd >= 1 else f"${usd:g}"
