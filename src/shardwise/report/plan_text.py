"""A plan as text for people and as JSON for programs. Pure functions of the answer."""

from collections.abc import Iterable
from typing import Any

from shardwise.facts.model import ModelShape
from shardwise.plan.model import Plan
from shardwise.plan.search import Answer, Option, Rejected, engine_name
from shardwise.units import format_bytes, format_count, format_gb, format_seconds, format_usd

ROWS = 12


def plan_text(answer: Answer, explain: bool = False) -> str:
    """The whole answer, most important things first; `explain` adds every term with its formula."""
    parts = [_model(answer), _rules(answer.question.shape), _recommendation(answer), _table(answer)]
    if explain and answer.options:
        parts.append(_explanation(answer.recommended or answer.options[0]))
    parts += [_methods(answer), _front(answer), _rejected(answer), _least(answer), _notes(answer)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _model(answer: Answer) -> str:
    q, shape = answer.question, answer.question.shape
    kind = (
        f"mixture of {shape.num_experts} experts, {shape.experts_per_token} per token"
        if shape.is_moe
        else "dense"
    )
    size = format_count(shape.total_parameters)
    if shape.is_moe:
        size += f" parameters, {format_count(shape.active_parameters)} active"
    else:
        size += " parameters"
    lines = [f"{shape.source}: {size}, {kind}, {shape.num_hidden_layers} layers, {shape.family}"]
    if q.data.tokens is not None:
        named = f" ({q.data.name})" if q.data.name else ""
        lines.append(
            f"data: {format_count(q.data.tokens)} tokens{named} x {q.epochs:g} "
            f"epoch{'s' if q.epochs != 1 else ''}, in sequences of {q.sequence_length:,}"
        )
    else:
        lines.append(
            f"data: not given, so no time and cost (add --data FILE or --tokens N); "
            f"sequences of {q.sequence_length:,}"
        )
    return "\n".join(lines)


def rule_of_thumb(shape: ModelShape) -> list[tuple[str, int, str]]:
    """(what, bytes, formula): full fine-tuning's states before activations."""
    n = shape.total_parameters
    return [
        ("12 bytes per parameter", 12 * n, "bf16 weights 2 + bf16 gradients 2 + two fp32 Adam states 8"),
        ("16 with fp32 master weights", 16 * n, "and an fp32 copy of the weights 4"),
    ]


def _rules(shape: ModelShape) -> str:
    n = format_count(shape.total_parameters)
    lines = ["full fine-tuning by the rule of thumb, before activations, over all GPUs together:"]
    for what, size, formula in rule_of_thumb(shape):
        lines.append(f"  {n} x {what} = {format_gb(size)}  ({formula})")
    return "\n".join(lines)


def recommendation(answer: Answer) -> str:
    """Two sentences a person can repeat."""
    best = answer.recommended
    if best is None:
        return _no_recommendation(answer)
    plan = best.plan
    s = plan.stack
    batch = f"{s.micro_batch_size} sequence{'s' if s.micro_batch_size > 1 else ''} per {_device(plan)}"
    check = {"none": "no", "selective": "selective", "full": "full"}[s.activation_checkpointing]
    first = (
        f"Train {_method_words(s.method)} with {engine_name(s)} on {plan.offer.name}, {batch} and {check} "
        f"activation checkpointing: {format_bytes(plan.needed_bytes)} of {format_bytes(plan.capacity_bytes)} "
        f"per {_device(plan)}{_tight(plan)}."
    )
    if best.seconds is None or best.low_seconds is None or best.high_seconds is None:
        speed = plan.speed
        second = (
            f"It should reach {speed.tokens_per_second_per_gpu:,.0f} tokens/s per {_device(plan)} "
            f"({speed.low_tokens_per_second_per_gpu:,.0f} to {speed.high_tokens_per_second_per_gpu:,.0f}), "
            f"that is {format_seconds(1e6 / speed.tokens_per_second_per_gpu / plan.offer.count)} per million tokens."
        )
    else:
        second = (
            f"It should take {format_seconds(best.seconds)} ({format_seconds(best.low_seconds)} to "
            f"{format_seconds(best.high_seconds)}) for {plan.steps:,} steps{_cost_words(best)}."
        )
    return f"{first} {second}"


def _tight(plan: Plan) -> str:
    return ", which is tight" if plan.verdict == "tight" else ""


def _device(plan: Plan) -> str:
    return "GPU" if plan.offer.gpu.kind == "cuda" else plan.offer.gpu.name


def _method_words(method: str) -> str:
    return {"full": "all weights", "lora": "LoRA adapters", "qlora": "QLoRA adapters on a 4-bit base"}[method]


def _cost_words(option: Option, joint: str = " and cost ") -> str:
    if option.cost is None:
        return ""
    c = option.cost
    return f"{joint}{format_usd(c.usd)} ({format_usd(c.low_usd)} to {format_usd(c.high_usd)})"


def _no_recommendation(answer: Answer) -> str:
    if answer.options:
        near = answer.options[0]
        return f"No stack meets the wish. Nearest is {near.label}: {near.missed}."
    changes = [c for r in answer.rejected for c in r.changes]
    needs = min(answer.rejected, key=lambda r: r.needed_bytes, default=None)
    words = "Nothing fits."
    if needs is not None:
        words += (
            f" The smallest, {needs.method} with {needs.engine}, needs {format_bytes(needs.needed_bytes)} of "
            f"{format_bytes(needs.capacity_bytes)} per GPU."
        )
    if changes:
        words += f" It would fit with: {', or '.join(dict.fromkeys(changes))}."
    return words


def _recommendation(answer: Answer) -> str:
    return "recommended:\n  " + recommendation(answer)


_HEAD = (
    "method", "engine", "GPUs", "micro", "recompute", "allocated", "shown", "free", "verdict", "tok/s/GPU", "MFU",
    "time", "cost",
)  # fmt: skip


def _table(answer: Answer) -> str:
    if not answer.options:
        return ""
    shown = _spread_rows(answer)
    rows = [_row(o) for o in shown]
    widths = [max(len(h), *(len(r[i]) for r in rows)) for i, h in enumerate(_HEAD)]
    lines = ["  ".join(h.ljust(w) for h, w in zip(_HEAD, widths, strict=True)).rstrip()]
    lines += ["  ".join(v.ljust(w) for v, w in zip(r, widths, strict=True)).rstrip() for r in rows]
    more = len(answer.options) - len(shown)
    if more > 0:
        lines.append(f"({more} more that fit; {answer.tried:,} tried; --json lists all)")
    lines.append(
        "allocated: peak of live tensors per GPU. shown: what nvidia-smi will show. free: head-room."
    )
    return "\n".join(lines)


def _spread_rows(answer: Answer) -> list[Option]:
    """The best rows of each method, so that a short table still compares methods."""
    methods = list(dict.fromkeys(o.plan.stack.method for o in answer.options))
    each = max(2, ROWS // max(1, len(methods)))
    kept: list[Option] = []
    for method in methods:
        kept += [o for o in answer.options if o.plan.stack.method == method][:each]
    return kept


def _row(option: Option) -> tuple[str, ...]:
    plan = option.plan
    s, m = plan.stack, plan.memory
    cost = "-" if option.cost is None else format_usd(option.cost.usd)
    return (
        s.method,
        engine_name(s),
        plan.offer.name,
        str(s.micro_batch_size),
        s.activation_checkpointing,
        format_bytes(m.allocated_bytes),
        format_bytes(m.device_bytes),
        f"{plan.head_room:.0%}",
        plan.verdict if not option.missed else f"{plan.verdict}, but {option.missed}",
        f"{plan.speed.tokens_per_second_per_gpu:,.0f}",
        f"{plan.speed.mfu:.0%}",
        "-" if option.seconds is None else format_seconds(option.seconds),
        cost,
    )


def _explanation(option: Option) -> str:
    plan = option.plan
    m = plan.memory
    lines = [f"memory of {option.label}, peak in phase '{m.peak_phase}' ({m.source}):"]
    for term in m.terms:
        if term.bytes:
            lines.append(f"  {term.name:15} {format_bytes(term.bytes):>10}  {term.formula}")
    lines.append(f"  {'allocated':15} {format_bytes(m.allocated_bytes):>10}  between "
                 f"{format_bytes(m.low_bytes)} and {format_bytes(m.high_bytes)}")  # fmt: skip
    lines.append(
        f"  {'fixed':15} {format_bytes(m.fixed_bytes):>10}  context, libraries, communication buffers"
    )
    lines.append(f"  {'host per node':15} {format_bytes(m.host_bytes_per_node):>10}")
    lines.append(f"  {'disk per node':15} {format_bytes(m.disk_bytes_per_node):>10}")
    speed = plan.speed
    lines.append(f"time of a step of {speed.tokens_per_step:,} tokens: {format_seconds(speed.step_seconds)}, "
                 f"bound by {speed.bound_by}:")  # fmt: skip
    for part in speed.parts:
        lines.append(f"  {part.name:22} {part.seconds / speed.step_seconds:5.0%}  {part.words}")
    if option.cost is not None:
        lines.append(f"price: {option.cost.usd_per_gpu_hour:.2f} USD per GPU and hour ({option.cost.source})")
        lines.append(
            f"energy: {option.cost.energy_kwh:,.1f} kWh at 85 % of the power limit and the host's share"
        )
    for choice in plan.choices:
        lines.append(f"  {choice.key} = {choice.value}: {choice.why}")
    return "\n".join(lines)


_GIVES = {
    "full": "changes what the model knows: new language, domain or behaviour at depth; every weight is stored anew",
    "lora": "steers what it knows: style, format, tasks; matches full training on instruction data of usual size "
    "(Biderman et al. 2024: it learns less and forgets less; Schulman et al. 2025: equal until capacity is used up)",
    "qlora": "as LoRA on a 4-bit base: about a quarter of the memory of the weights, 10 to 40 % slower "
    "(Dettmers et al. 2023: no loss against 16-bit LoRA on MMLU)",
}


def _methods(answer: Answer) -> str:
    """The three methods side by side, where more than one was in question."""
    best: dict[str, Option] = {}
    for option in answer.options:
        best.setdefault(option.plan.stack.method, option)
    if len(answer.question.methods) < 2:
        return ""
    lines = ["what each method gives, and the best of each that fits:"]
    for method in answer.question.methods:
        found = best.get(method)
        if found is None:
            cost = "does not fit"
        elif found.seconds is None:
            cost = f"{format_bytes(found.plan.needed_bytes)} per GPU on {found.plan.offer.name}"
        else:
            cost = f"{found.plan.offer.name}, {format_seconds(found.seconds)}{_cost_words(found, ', ')}"
        lines.append(f"  {method}: {cost}\n    {_GIVES[method]}")
    return "\n".join(lines)


def _front(answer: Answer) -> str:
    if len(answer.front) < 2:
        return ""
    lines = ["time against cost (no other option is both faster and cheaper):"]
    for o in answer.front[:8]:
        assert o.seconds is not None and o.cost is not None
        lines.append(f"  {format_seconds(o.seconds):>14}  {format_usd(o.cost.usd):>10}  {o.label}")
    return "\n".join(lines)


def _rejected(answer: Answer) -> str:
    if not answer.rejected:
        return ""
    lines = ["does not fit:"]
    lines += [f"  {_rejected_words(r)}" for r in answer.rejected]
    return "\n".join(lines)


def _rejected_words(r: Rejected) -> str:
    words = f"{r.method} with {r.engine}: at least {format_bytes(r.needed_bytes)} of "
    words += f"{format_bytes(r.capacity_bytes)} per GPU"
    if r.reason.startswith("the host"):
        words = f"{r.method} with {r.engine}: {r.reason}"
    return words + (f"; would fit with {', or '.join(r.changes)}" if r.changes else "")


def _least(answer: Answer) -> str:
    if not answer.least:
        return ""
    kinds = list(dict.fromkeys(item.gpu for item in answer.least))
    lines = ["least number of GPUs that hold it (nothing offloaded, full recomputation, micro-batch 1):"]
    for kind in kinds:
        counts = [
            f"{x.method} {x.count if x.count is not None else 'never'}" for x in answer.least if x.gpu == kind
        ]
        lines.append(f"  {kind:16} {', '.join(counts)}")
    return "\n".join(lines)


def _notes(answer: Answer) -> str:
    notes: Iterable[str] = (*answer.question.shape.notes, *answer.notes)
    offers = (n for o in answer.question.offers for n in o.notes)
    return "\n".join(f"note: {n}" for n in dict.fromkeys((*notes, *offers)))


def plan_json(answer: Answer) -> dict[str, Any]:
    """The answer as plain values: bytes, seconds, dollars."""
    q = answer.question
    return {
        "model": {
            "source": q.shape.source,
            "family": q.shape.family,
            "total_parameters": q.shape.total_parameters,
            "active_parameters": q.shape.active_parameters,
        },
        "question": {
            "tokens": q.data.tokens,
            "epochs": q.epochs,
            "sequence_length": q.sequence_length,
            "methods": list(q.methods),
            "offers": [o.name for o in q.offers],
            "budget_usd": q.budget_usd,
            "deadline_seconds": q.deadline_seconds,
        },
        "rule_of_thumb": [{"what": w, "bytes": b, "formula": f} for w, b, f in rule_of_thumb(q.shape)],
        "recommendation": recommendation(answer),
        "recommended": None if answer.recommended is None else option_json(answer.recommended),
        "options": [option_json(o) for o in answer.options],
        "front": [{"seconds": o.seconds, "usd": o.cost.usd if o.cost else None, "option": o.label}
                  for o in answer.front],
        "rejected": [
            {"method": r.method, "engine": r.engine, "offer": r.offer.name, "needed_bytes": r.needed_bytes,
             "capacity_bytes": r.capacity_bytes, "reason": r.reason, "changes": list(r.changes)}
            for r in answer.rejected
        ],
        "least_gpus": [{"gpu": x.gpu, "method": x.method, "count": x.count} for x in answer.least],
        "tried": answer.tried,
        "notes": [*q.shape.notes, *answer.notes],
    }  # fmt: skip


def option_json(option: Option) -> dict[str, Any]:
    """One option as plain values."""
    plan = option.plan
    s, m, speed = plan.stack, plan.memory, plan.speed
    return {
        "method": s.method,
        "engine": engine_name(s),
        "gpu": plan.offer.gpu.name,
        "world_size": s.world_size,
        "nodes": plan.offer.nodes,
        "micro_batch_size": s.micro_batch_size,
        "global_batch_size": s.global_batch_size,
        "activation_checkpointing": s.activation_checkpointing,
        "precision": s.precision,
        "verdict": plan.verdict,
        "missed": option.missed,
        "head_room": plan.head_room,
        "memory": {
            "allocated_bytes": m.allocated_bytes,
            "low_bytes": m.low_bytes,
            "high_bytes": m.high_bytes,
            "reserved_bytes": m.reserved_bytes,
            "fixed_bytes": m.fixed_bytes,
            "capacity_bytes": plan.capacity_bytes,
            "host_bytes_per_node": m.host_bytes_per_node,
            "disk_bytes_per_node": m.disk_bytes_per_node,
            "peak_phase": m.peak_phase,
            "source": m.source,
            "terms": [{"name": t.name, "bytes": t.bytes, "formula": t.formula} for t in m.terms],
        },
        "speed": {
            "step_seconds": speed.step_seconds,
            "low_seconds": speed.low_seconds,
            "high_seconds": speed.high_seconds,
            "tokens_per_second_per_gpu": speed.tokens_per_second_per_gpu,
            "mfu": speed.mfu,
            "parts": [{"name": p.name, "seconds": p.seconds, "words": p.words} for p in speed.parts],
        },
        "steps": plan.steps,
        "seconds": option.seconds,
        "low_seconds": option.low_seconds,
        "high_seconds": option.high_seconds,
        "cost": None
        if option.cost is None
        else {
            "usd": option.cost.usd,
            "low_usd": option.cost.low_usd,
            "high_usd": option.cost.high_usd,
            "usd_per_gpu_hour": option.cost.usd_per_gpu_hour,
            "source": option.cost.source,
            "purchase_usd": option.cost.purchase_usd,
        },
        "energy_kwh": option.energy_kwh,
        "choices": [{"key": c.key, "value": c.value, "why": c.why} for c in plan.choices],
    }
