"""The ranked table of a plan, as text: one line per stack with what it takes and what it costs."""

from shardwise.plan.search import Answer, Option, engine_name
from shardwise.units import format_bytes, format_usd

ROWS = 12
_HEAD = (
    "method", "engine", "GPUs", "micro", "recompute", "allocated", "shown", "free", "host", "disk", "verdict",
    "tok/s/GPU", "MFU", "time", "cost", "energy",
)  # fmt: skip
_UNITS = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))


def table(answer: Answer) -> str:
    """The best stacks, best first; empty where nothing fits."""
    if not answer.options:
        return ""
    shown = shown_options(answer)
    rows = [_row(o) for o in shown]
    widths = [max(len(h), *(len(r[i]) for r in rows)) for i, h in enumerate(_HEAD)]
    lines = ["  ".join(h.ljust(w) for h, w in zip(_HEAD, widths, strict=True)).rstrip()]
    lines += ["  ".join(v.ljust(w) for v, w in zip(r, widths, strict=True)).rstrip() for r in rows]
    more = len(answer.options) - len(shown)
    if more > 0:
        lines.append(f"({more} more that fit; {answer.tried:,} tried; --json lists all)")
    lines.append(
        "allocated: peak of live tensors per GPU. shown: what nvidia-smi will show. free: head-room. "
        "host, disk: per node."
    )
    return "\n".join(lines)


def shown_options(answer: Answer) -> list[Option]:
    """The best of each method, so that a short table still compares them; and of each offer where some were given."""
    methods = list(dict.fromkeys(o.plan.stack.method for o in answer.options))
    each = max(2, ROWS // max(1, len(methods)))
    kept: list[Option] = []
    for method in methods:
        found = [o for o in answer.options if o.plan.stack.method == method]
        if len(answer.question.offers) > 1:
            firsts = list({o.plan.offer.name: o for o in reversed(found)}.values())
            rest = [o for o in found if o not in firsts]
            chosen = [*sorted(firsts, key=found.index), *rest][: max(each, len(firsts))]
            found = sorted(chosen, key=found.index)
        else:
            found = found[:each]
        kept += found
    return kept


def _row(option: Option) -> tuple[str, ...]:
    plan = option.plan
    s, m = plan.stack, plan.memory
    return (
        s.method,
        engine_name(s),
        plan.offer.name,
        str(s.micro_batch_size),
        s.recomputed,
        format_bytes(m.allocated_bytes),
        format_bytes(m.device_bytes),
        f"{plan.head_room:.0%}",
        format_bytes(m.host_bytes_per_node),
        format_bytes(m.disk_bytes_per_node),
        plan.verdict if not option.missed else f"{plan.verdict}, but {option.missed}",
        f"{plan.speed.tokens_per_second_per_gpu:,.0f}",
        f"{plan.speed.mfu:.0%}",
        seconds_range(option) or "-",
        usd_range(option) or "-",
        "-" if option.energy_kwh is None else f"{option.energy_kwh:,.1f} kWh",
    )


def seconds_range(option: Option) -> str:
    """'35 min (28 to 46)'; empty where the time is not known."""
    if option.seconds is None or option.low_seconds is None or option.high_seconds is None:
        return ""
    size, unit = next((u for u in _UNITS if option.seconds >= 2 * u[0]), _UNITS[-1])
    middle, low, high = (_short(x / size) for x in (option.seconds, option.low_seconds, option.high_seconds))
    return f"{middle} {unit} ({low} to {high})"


def usd_range(option: Option) -> str:
    """'$13.8 ($10 to $42)'; empty where the cost is not known."""
    if option.cost is None:
        return ""
    c = option.cost
    return f"{format_usd(c.usd)} ({format_usd(c.low_usd)} to {format_usd(c.high_usd)})"


def _short(value: float) -> str:
    return f"{value:.1f}" if value < 10 else f"{value:,.0f}"
