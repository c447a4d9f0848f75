"""The memory of one plan taken apart: by phase, module and line, as a sum of monomials, and what more would cost."""

from typing import Any

from shardwise.estimate.memory.monomials import WORDS, Formula, formula_of, written
from shardwise.estimate.memory.parts import parts_of
from shardwise.estimate.memory.terms import MemoryEstimate
from shardwise.estimate.stack import Stack
from shardwise.facts.model import ModelShape
from shardwise.report.sources import source_of
from shardwise.units import format_bytes

LARGEST_PARTS = 10
SMALL = 1e-3  # monomials below this share of the peak are added up in one word
_MORE = {
    "micro_batch_size": "one more sequence per micro-batch",
    "thousand_tokens": "1,000 more tokens per sequence",
    "lora_rank": "one more rank of the adapters",
    "world_size": "one more GPU",
}


def formula_lines(shape: ModelShape, stack: Stack, memory: MemoryEstimate) -> list[str]:
    """Lines for `plan --explain`."""
    formula = formula_of(shape, stack)
    phases = ", ".join(f"{name} {format_bytes(size)}" for name, size in memory.phases.items())
    lines = [f"  highest of each phase: {phases}", "  by module and line, the largest at the peak:"]
    for part in parts_of(shape, stack)[:LARGEST_PARTS]:
        where = f"{part.term} {part.module}".rstrip()
        lines.append(f"  {format_bytes(part.bytes):>12}  {where:48}  {source_of(part, stack)}")
    lines.append("  allocated is the sum of these, in bytes:")
    for term, monomials in formula.terms.items():
        lines.append(f"    {term:15} {_sum_text(formula, monomials)}")
    known = ", ".join(
        f"{name} = {value:,.0f} {WORDS[name]}" for name, value in formula.values.items() if name in WORDS
    )
    lines.append(f"    with {known}")
    more = [
        f"{_MORE[name]} {_signed(change)}" for name, change in formula.sensitivities.items() if round(change)
    ]
    if more:
        lines.append(f"  while the peak stays at that moment: {', '.join(more)}")
    return lines


def formula_json(shape: ModelShape, stack: Stack) -> dict[str, Any]:
    """The same as plain values; `monomials` hold symbol -> power and the bytes per unit."""
    formula = formula_of(shape, stack)
    return {
        "phase": formula.phase,
        "symbols": {
            name: {"value": value, "what": WORDS.get(name, name)} for name, value in formula.values.items()
        },
        "terms": {
            term: [{"powers": dict(m), "bytes": factor} for m, factor in monomials.items()]
            for term, monomials in formula.terms.items()
        },
        "sensitivities_bytes": formula.sensitivities,
        "parts": [
            {"bytes": p.bytes, "term": p.term, "module": p.module, "source": source_of(p, stack)}
            for p in parts_of(shape, stack)
        ],
    }


def _sum_text(formula: Formula, monomials: dict[Any, float]) -> str:
    """The larger monomials, and the number of the others with their sum."""
    total = formula.bytes_at()
    sizes = {m: formula.bytes_at_monomial(m, factor) for m, factor in monomials.items()}
    ordered = sorted(monomials, key=lambda m: -abs(sizes[m]))
    shown = [m for m in ordered if abs(sizes[m]) >= SMALL * total] or ordered[:1]
    text = ""
    for m in shown:
        factor = monomials[m]
        sign = ("-" if factor < 0 else "") if not text else (" - " if factor < 0 else " + ")
        name = written(m)
        text += f"{sign}{abs(factor):.6g}" + ("" if name == "1" else f" {name}")
    rest = sum(sizes[m] for m in ordered if m not in shown)
    return text + (f" + {len(ordered) - len(shown)} small ones" if round(rest) else "")


def _signed(change: float) -> str:
    return ("+" if change > 0 else "-") + format_bytes(round(abs(change)))
