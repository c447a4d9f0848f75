"""A plan as text for people: the most important things first. Pure functions of the answer."""

from collections.abc import Iterable

from shardwise.estimate.cost import HOST_SHARE, POWER_SHARE
from shardwise.estimate.stack import Stack
from shardwise.facts.model import ModelShape
from shardwise.plan.model import Plan
from shardwise.plan.search import Answer, Option, Rejected, engine_name
from shardwise.report.plan_formula import formula_lines
from shardwise.report.plan_table import seconds_range, table, usd_range
from shardwise.units import format_bytes, format_count, format_gb, format_seconds, format_usd


def plan_text(answer: Answer, explain: bool = False) -> str:
    """The whole answer, most important things first; `explain` adds every term with its formula."""
    parts = [_model(answer), _rules(answer.question.shape), _recommendation(answer), table(answer)]
    if explain and answer.options:
        parts.append(_explanation(answer, answer.recommended or answer.options[0]))
    parts += [_methods(answer), _front(answer), _rejected(answer), _least(answer)]
    parts += [_assumptions(answer), _notes(answer)]
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
    kind = s.activation_checkpointing
    recomputes = (
        f"activation checkpointing of {kind} of {plan.shape.num_hidden_layers} layers"
        if isinstance(kind, int)
        else f"{'no' if kind == 'none' else kind} activation checkpointing"
    )
    first = (
        f"Train {_method_words(s.method)}{_engine_words(s)} on {plan.offer.name}, {batch} and {recomputes}: "
        f"{format_bytes(plan.needed_bytes)} of {format_bytes(plan.capacity_bytes)} "
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
            f"{format_seconds(best.high_seconds)}) for {plan.steps:,} steps{_cost_words(best, answer.question.buy)}."
        )
    return f"{first} {second}"


def _engine_words(stack: Stack) -> str:
    return "" if stack.sharding == "single" else f" with {engine_name(stack)}"


def _tight(plan: Plan) -> str:
    return ", which is tight" if plan.verdict == "tight" else ""


def _device(plan: Plan) -> str:
    return "GPU" if plan.offer.gpu.kind == "cuda" else plan.offer.gpu.name


def _method_words(method: str) -> str:
    return {"full": "all weights", "lora": "LoRA adapters", "qlora": "QLoRA adapters on a 4-bit base"}[method]


def _cost_words(option: Option, buy: bool) -> str:
    if option.cost is None:
        return ""
    c = option.cost
    words = f" and cost {format_usd(c.usd)} ({format_usd(c.low_usd)} to {format_usd(c.high_usd)})"
    if not buy:
        return words
    words += ", as its share of owning them"
    return words if c.purchase_usd is None else f"{words}; to buy they are about {format_usd(c.purchase_usd)}"


def _no_recommendation(answer: Answer) -> str:
    if answer.options:
        return f"No stack meets the wish. {_nearest_wish(answer)}"
    changes = [c for r in answer.rejected for c in r.changes]
    needs = min(answer.rejected, key=lambda r: r.needed_bytes, default=None)
    words = "Nothing fits."
    if needs is not None:
        words += (
            f" The smallest, {needs.method} with {needs.engine}, needs {format_bytes(needs.needed_bytes)} of "
            f"{format_bytes(needs.capacity_bytes)} per GPU"
        )
        host = needs.reason.startswith("the host")
        words += f"; {needs.reason}." if host else "."
    if changes:
        words += f" It would fit with: {', or '.join(dict.fromkeys(changes))}."
    return words


def _nearest_wish(answer: Answer) -> str:
    """The smallest change of budget or deadline after which something meets both."""
    q = answer.question
    timed = [o for o in answer.options if o.seconds is not None]
    words = []
    if q.budget_usd is not None:
        in_time = [
            o
            for o in timed
            if o.cost and (q.deadline_seconds is None or (o.seconds or 0) <= q.deadline_seconds)
        ]
        if in_time:
            cheap = min(in_time, key=lambda o: o.cost.usd if o.cost else 0.0)
            assert cheap.cost is not None and cheap.seconds is not None
            words.append(
                f"The cheapest{' within the deadline' if q.deadline_seconds else ''} is {cheap.label}: "
                f"{format_usd(cheap.cost.usd)}, {format_seconds(cheap.seconds)}."
            )
    if q.deadline_seconds is not None:
        paid = [o for o in timed if q.budget_usd is None or (o.cost and o.cost.usd <= q.budget_usd)]
        if paid:
            fast = min(paid, key=lambda o: o.seconds or 0.0)
            price = "" if fast.cost is None else f", {format_usd(fast.cost.usd)}"
            words.append(
                f"The fastest{' within the budget' if q.budget_usd else ''} is {fast.label}: "
                f"{format_seconds(fast.seconds or 0.0)}{price}."
            )
    if not words:
        words.append(f"Nearest is {answer.options[0].label}: {answer.options[0].missed}.")
    return " ".join(words)


def _recommendation(answer: Answer) -> str:
    return "recommended:\n  " + recommendation(answer)


def _explanation(answer: Answer, option: Option) -> str:
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
    lines += formula_lines(answer.question.shape, plan.stack, m)
    speed = plan.speed
    lines.append(f"time of a step of {speed.tokens_per_step:,} tokens: {format_seconds(speed.step_seconds)}, "
                 f"bound by {speed.bound_by}:")  # fmt: skip
    for part in speed.parts:
        lines.append(f"  {part.name:22} {part.seconds / speed.step_seconds:5.0%}  {part.words}")
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
    goal = {"steer": "to steer what the model knows", "teach": "to teach the model"}[answer.question.goal]
    other = "teach" if answer.question.goal == "steer" else "steer"
    lines = [
        f"recommended {goal} (--goal {other} for the other); what each method gives, best of each that fits:"
    ]
    full = best.get("full")
    for method in answer.question.methods:
        found = best.get(method)
        if found is None:
            cost = "does not fit"
        elif found.seconds is None:
            cost = f"{format_bytes(found.plan.needed_bytes)} per GPU on {found.plan.offer.name}"
        else:
            cost = ", ".join(x for x in (found.plan.offer.name, seconds_range(found), usd_range(found)) if x)
        if found is not None and full is not None and method != "full" and found.cost and full.cost:
            cost += f", {found.cost.usd / full.cost.usd:.0%} of full's cost"
        lines.append(f"  {method}: {cost}\n    {_GIVES[method]}")
    return "\n".join(lines)


MOST_OF_FRONT = 8


def _front(answer: Answer) -> str:
    if len(answer.front) < 2:
        return ""
    lines = ["time against cost (no other option is both faster and cheaper):"]
    # both ends, and as many between them
    last, most = len(answer.front) - 1, min(MOST_OF_FRONT, len(answer.front))
    for o in (answer.front[round(i * last / (most - 1))] for i in range(most)):
        assert o.seconds is not None and o.cost is not None
        lines.append(f"  {format_seconds(o.seconds):>14}  {format_usd(o.cost.usd):>10}  {o.label}")
    if most <= last:
        lines.append(f"  ({last + 1 - most} more between them; --json lists all)")
    return "\n".join(lines)


def _rejected(answer: Answer) -> str:
    """One line per offer and method: which engines do not fit, by how much, and what would make one fit."""
    if not answer.rejected:
        return ""
    lines = ["does not fit (smallest stack of each engine, per GPU):"]
    groups: dict[tuple[str, str], list[Rejected]] = {}
    for r in answer.rejected:
        groups.setdefault((r.method, r.offer.name), []).append(r)
    for (method, offer), rejected in groups.items():
        capacity = format_bytes(rejected[0].capacity_bytes)
        engines = ", ".join(
            f"{r.engine} {format_bytes(r.needed_bytes)}"
            if not r.reason.startswith("the host")
            else f"{r.engine} {format_bytes(r.needed_bytes)} ({r.reason})"
            for r in rejected
        )
        lines.append(f"  {method} on {offer}, {capacity} each: {engines}")
        for r in rejected:
            if r.changes:
                lines.append(f"    would fit with: {', or '.join(r.changes)}")
    return "\n".join(lines)


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


def assumptions(answer: Answer) -> list[str]:
    """What memory, time, cost and energy of the recommended option (else of the first) rest on, with sources."""
    option = answer.recommended or (answer.options[0] if answer.options else None)
    if option is None:
        return []
    plan, gpu = option.plan, option.plan.offer.gpu
    peak = gpu.peak_flops(plan.stack.precision)
    lines = [
        f"rates: {peak / 1e12:,.3g} TFLOP/s dense in {plan.stack.precision}, of which long runs hold "
        f"{gpu.sustained:.0%}; memory {format_gb(gpu.bandwidth_bytes_per_second)}/s ({gpu.source})"
    ]
    if gpu.pace_words:
        lines.append(f"measured: {gpu.pace_words}")
    lines += [f"memory: {note}" for note in plan.memory.notes]
    if plan.offer.count > 1:
        between = f", {gpu.network.name} between {plan.offer.nodes} nodes" if plan.offer.nodes > 1 else ""
        lines.append(f"links: {gpu.link.name} within a node{between}")
    if option.seconds is not None:
        filled = f"{plan.fill:.0%} full" if plan.fill < 0.995 else "full"
        lines.append(
            f"time: {plan.steps:,} steps of {plan.stack.global_batch_size} sequences, {filled}, and one minute to "
            "start and read the weights; evaluation and saving come on top"
        )
    if plan.stack.document_tokens is not None:
        lines.append(
            f"rows: a token attends within {plan.stack.attended_tokens:,.0f} tokens on average (rows packed into one "
            f"sequence do not see each other), and {plan.stack.labelled_share:.0%} of tokens have a label"
        )
    if option.cost is not None:
        per = f"price: {option.cost.usd_per_gpu_hour:.2f} USD per GPU and hour: {option.cost.source}"
        lines.append(per)
    if option.energy_kwh is not None and gpu.kind == "cuda":
        lines.append(
            f"energy: {option.energy_kwh:,.1f} kWh, at {POWER_SHARE:.0%} of {gpu.power_watts:,.0f} W per GPU and "
            f"{HOST_SHARE:.0%} more for the hosts"
        )
    return lines


def _assumptions(answer: Answer) -> str:
    lines = assumptions(answer)
    label = (answer.recommended or answer.options[0]).label if lines else ""
    return "\n".join([f"{label} assumes:", *(f"  {line}" for line in lines)]) if lines else ""


def _notes(answer: Answer) -> str:
    notes: Iterable[str] = (*answer.question.shape.notes, *answer.notes)
    offers = (n for o in answer.question.offers for n in o.notes)
    return "\n".join(f"note: {n}" for n in dict.fromkeys((*notes, *offers)))
