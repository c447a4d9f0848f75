"""The plan of one decided run, as `train` and `demo` print it before the first step."""

from dataclasses import asdict
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from shardwise.plan.model import Plan
from shardwise.plan.search import engine_name
from shardwise.units import format_bytes, format_count, format_seconds

_METHODS = {"full": "all weights", "lora": "LoRA adapters", "qlora": "LoRA adapters on a 4-bit base"}


def decided_text(plan: Plan) -> RenderableType:
    """What will run, what it takes term by term, how long, and why it was decided so."""
    return Group(_head(plan), _memory(plan), _time(plan), _choices(plan))


def decided_json(plan: Plan) -> dict[str, Any]:
    """The same as plain values; what plan.json of a run folder holds."""
    return {
        "model": {"source": plan.shape.source, "total_parameters": plan.shape.total_parameters},
        "offer": plan.offer.name,
        "stack": asdict(plan.stack),
        "verdict": plan.verdict,
        "capacity_bytes": plan.capacity_bytes,
        "memory": asdict(plan.memory),
        "steps": plan.steps,
        "seconds": plan.seconds,
        "step_seconds": plan.speed.step_seconds,
        "low_step_seconds": plan.speed.low_seconds,
        "high_step_seconds": plan.speed.high_seconds,
        "tokens_per_second_per_gpu": plan.speed.tokens_per_second_per_gpu,
        "choices": [asdict(choice) for choice in plan.choices],
        "notes": list(plan.notes),
    }


def _head(plan: Plan) -> Text:
    stack, shape = plan.stack, plan.shape
    text = Text()
    text.append("plan  ", style="bold")
    text.append(
        f"{_METHODS[stack.method]} of {format_count(shape.total_parameters)} parameters, {stack.precision}, "
        f"engine {engine_name(stack)} on {plan.offer.name}: "
    )
    verdict = plan.verdict
    text.append(verdict, style="bold green" if verdict == "fits" else "bold red")
    text.append(
        f"\n      {stack.global_batch_size} sequences of up to {stack.sequence_length:,} tokens per step"
        f" ({stack.gradient_accumulation_steps} x {stack.micro_batch_size} on {stack.world_size}),"
        f" recompute {stack.recomputed}\n"
    )
    return text


def _memory(plan: Plan) -> Table:
    memory = plan.memory
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("memory at the peak")
    table.add_column("estimate", justify="right", no_wrap=True)
    table.add_column("how it is counted", overflow="fold")
    for term in memory.terms:
        if term.bytes:
            table.add_row(f"  {term.name}", format_bytes(term.bytes), term.formula)
    table.add_row(
        "  allocated",
        format_bytes(memory.allocated_bytes),
        f"live tensors, highest in phase '{memory.peak_phase}'; between {format_bytes(memory.low_bytes)} and "
        f"{format_bytes(memory.high_bytes)}",
        style="bold",
    )
    fixed = "the process beside its tensors: libraries, context, communication buffers"
    table.add_row("  fixed", format_bytes(memory.fixed_bytes), fixed)
    table.add_row("  there is", format_bytes(plan.capacity_bytes), f"on {plan.offer.gpu.name}")
    return table


def _time(plan: Plan) -> Text:
    speed = plan.speed
    low, high = plan.low_seconds, plan.high_seconds
    if plan.steps is None or plan.seconds is None or low is None or high is None:
        return Text("")
    return Text(
        f"\ntime  {plan.steps} steps in {format_seconds(plan.seconds)} ({format_seconds(low)} to "
        f"{format_seconds(high)}), {speed.tokens_per_second_per_gpu:,.0f} tokens/s; loading, evaluation and "
        "saving come on top\n"
    )


def _choices(plan: Plan) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=bool(plan.choices))
    table.add_column("decided", no_wrap=True)
    table.add_column("value", no_wrap=True)
    table.add_column("because", overflow="fold")
    for choice in plan.choices:
        table.add_row(f"  {choice.key}", choice.value, choice.why)
    for note in plan.notes:
        table.add_row("  note", "", note)
    return table
