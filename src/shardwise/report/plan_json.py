"""A plan as JSON for programs: bytes, seconds, dollars."""

from typing import Any

from shardwise.plan.search import Answer, Option, engine_name
from shardwise.report.plan_formula import formula_json
from shardwise.report.plan_text import assumptions, recommendation, rule_of_thumb


def plan_json(answer: Answer, explain: bool = False) -> dict[str, Any]:
    """The answer as plain values: bytes, seconds, dollars. `explain` adds the formula of the recommended option's
    memory (of the first one's, where none is recommended) as `memory_formula`.
    """
    q = answer.question
    first = answer.recommended or (answer.options[0] if answer.options else None)
    formula = {}
    if explain and first is not None:
        formula["memory_formula"] = formula_json(q.shape, first.plan.stack)
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
            "buy": q.buy,
            "goal": q.goal,
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
        "assumptions": assumptions(answer),
        "tried": answer.tried,
        "notes": [*q.shape.notes, *answer.notes],
        **formula,
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
            "phases": m.phases,
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
