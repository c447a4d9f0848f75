"""Which stack on which GPUs: enumerate, estimate, keep what fits, and rank."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from math import inf
from typing import Any

from shardwise.errors import RuleError
from shardwise.estimate.cost import energy_kwh, estimate_cost
from shardwise.estimate.speed import estimate_speed
from shardwise.estimate.stack import Stack
from shardwise.facts.gpus import Offer, catalogue
from shardwise.facts.model import ModelShape
from shardwise.plan.fastest import Grid, fastest, grid_of
from shardwise.plan.fewest import least_gpus, least_possible_bytes, rejections
from shardwise.plan.model import Plan, disk_holds, fill_of, planned_steps, verdict
from shardwise.plan.question import (
    CHECKPOINTING,
    COUNTS,
    METHODS,
    Answer,
    Option,
    Question,
    Rejected,
    bucket,
    engine_name,
    simplicity,
)
from shardwise.plan.resolve import ADAPTER_TOKENS, CPU_TOKENS, FEWEST_STEPS, FULL_TOKENS
from shardwise.recipe.schema import Recipe
from shardwise.rules import Problem, problems
from shardwise.units import format_bytes

__all__ = ["METHODS", "Answer", "Option", "Question", "Rejected", "answer", "engine_name", "pareto"]

MICROS = (1, 2, 4, 8, 16, 32)
START_SECONDS = 60.0  # processes, libraries, kernels


def grids(question: Question, method: str, offer: Offer) -> Iterator[Grid]:
    """Every stack of a method on an offer: per engine and offload a grid of checkpointing x micro-batch."""
    per_rank = global_batch(question, method, offer) // offer.count
    kinds = _asked(question.activation_checkpointing, CHECKPOINTING)
    micros = _asked(question.micro_batch_size, MICROS)
    for base in _shardings(question, method, offer):
        grid = grid_of(question.shape, base, per_rank, kinds, micros)
        if grid.micros:
            yield grid


def _asked(only: Any, every: tuple[Any, ...]) -> tuple[Any, ...]:
    return every if only is None else (only,)


def global_batch(question: Question, method: str, offer: Offer) -> int:
    """Sequences per step: what was asked, else about the usual number of tokens; a multiple of the ranks."""
    ranks = offer.count
    if question.global_batch_size is not None:
        return max(ranks, question.global_batch_size // ranks * ranks)
    aim = CPU_TOKENS if offer.gpu.kind != "cuda" else FULL_TOKENS if method == "full" else ADAPTER_TOKENS
    wanted = max(1, aim // question.sequence_length)
    sequences = question.data.sequences(question.sequence_length)
    if sequences is not None:
        wanted = max(1, min(wanted, sequences // FEWEST_STEPS))
    per_rank = max(1, wanted // ranks)
    per_rank = 1 << (per_rank.bit_length() - 1)  # a power of two, so that micro-batches divide it
    if question.micro_batch_size is not None:
        per_rank = max(1, per_rank // question.micro_batch_size) * question.micro_batch_size
    return per_rank * ranks


def _shardings(question: Question, method: str, offer: Offer) -> tuple[Stack, ...]:
    gpu, ranks = offer.gpu, offer.count
    draft = Stack(
        method=method,  # type: ignore[arg-type]
        world_size=ranks,
        gpus_per_node=min(ranks, offer.gpus_per_node),
        sequence_length=question.sequence_length,
        precision="bf16" if gpu.has_bf16 else "fp32",
        master_weights=question.master_weights,
        lora_rank=question.lora_rank,
        lora_targets=question.lora_targets,
        device=gpu.kind,
        labelled_share=question.data.labelled_share,
        document_tokens=question.data.document_tokens,
    )
    return _engines(draft, offer.nodes)


@lru_cache(maxsize=4096)
def _engines(draft: Stack, nodes: int) -> tuple[Stack, ...]:
    """The draft under every engine and offload that such GPUs allow."""
    return tuple(_every_engine(draft, nodes))


def _every_engine(draft: Stack, nodes: int) -> Iterator[Stack]:
    method, ranks, cuda = draft.method, draft.world_size, draft.device == "cuda"
    sharded = method != "qlora"  # 4-bit weights under DeepSpeed are not sharded while loading: FSDP2 or DDP
    if ranks == 1:
        yield draft
        if cuda and method == "full":
            yield replace(draft, sharding="zero2", offload_optimizer="cpu")
        if cuda and sharded:
            yield replace(draft, sharding="zero3", offload_optimizer="cpu", offload_parameters="cpu")
            yield replace(draft, sharding="zero3", offload_optimizer="nvme", offload_parameters="nvme")
        return
    yield replace(draft, sharding="ddp")
    yield replace(draft, sharding="fsdp2")
    if 1 < nodes < ranks:
        yield replace(draft, sharding="fsdp2", dp_replicate=nodes)
    yield replace(draft, sharding="fsdp2", offload_optimizer="cpu", offload_parameters="cpu")
    if sharded:
        yield replace(draft, sharding="zero1")
        yield replace(draft, sharding="zero2")
        yield replace(draft, sharding="zero3")
        if method == "full":
            yield replace(draft, sharding="zero2", offload_optimizer="cpu")
        yield replace(draft, sharding="zero3", offload_optimizer="cpu", offload_parameters="cpu")


def answer(question: Question) -> Answer:
    """Search the offers (or the catalogue) and rank what fits.

    Methods that rules refuse for the model are left out, with a note. Raises RuleError when none remains.
    """
    question, refused = _with_legal_methods(question)
    offers = question.offers or tuple(catalogue_offers(question))
    options: list[Option] = []
    rejected: list[Rejected] = []
    tried = 0
    for offer in offers:
        for method in question.methods:
            best, smallest, count = _best_of(question, method, offer)
            tried += count
            options += best
            if question.offers:
                rejected += rejections(question, method, offer, best, smallest)
    options = [_with_wish(question, o) for o in options]
    preferred = preference(question)
    ranked = sorted(options, key=lambda o: _rank(question, preferred, o))
    return Answer(
        question=question,
        options=tuple(ranked),
        front=pareto(ranked),
        recommended=next((o for o in ranked if not o.missed), None),
        rejected=tuple(rejected),
        least=tuple(least_gpus(question)),
        tried=tried,
        notes=(*refused, *_notes(question, ranked)),
    )


def _with_legal_methods(question: Question) -> tuple[Question, tuple[str, ...]]:
    found = {method: _refusal(question.shape, method) for method in question.methods}
    refused = {method: problem for method, problem in found.items() if problem is not None}
    if not refused:
        return question, ()
    if len(refused) == len(found):
        only = next(iter(refused.values()))
        raise RuleError(only.what, f"{only.why} ({only.link})", only.hint)
    legal = tuple(m for m in question.methods if m not in refused)
    notes = tuple(f"{method} is not in question here: {p.why}" for method, p in refused.items())
    return replace(question, methods=legal), notes


@lru_cache(maxsize=256)
def _refusal(shape: ModelShape, method: str) -> Problem | None:
    """The rule that keeps a method from this model, whatever the engine."""
    recipe = Recipe.model_validate(
        {"model": {"source": shape.source}, "data": {"train": "rows.jsonl"}, "method": method}
    )
    return next(iter(problems(recipe, shape)), None)


def _notes(question: Question, ranked: Sequence[Option]) -> Iterator[str]:
    """What explains an answer that a reader may not expect."""
    shape, best = question.shape, next((o for o in ranked if not o.missed), None)
    yield from _price_notes(question)
    first = preference(question)[0]
    if best is not None and best.plan.stack.method != first:
        other = next((o for o in ranked if o.plan.stack.method == first), None)
        why = f"{other.missed} on {other.plan.offer.name}" if other is not None else "does not fit"
        yield f"{first}, which the goal asks for first, {why}"
    if best is not None and not disk_holds(best.plan.memory, best.plan.offer):
        yield (
            f"model and checkpoints take {format_bytes(best.plan.memory.disk_bytes_per_node)} per node, more than "
            f"the {format_bytes(best.plan.offer.gpu.disk_bytes)} counted with: put the run on shared storage"
        )
    if shape.is_moe:
        billions, gib = shape.layer_parameters / 1e9, 2 * shape.layer_parameters / 2**30
        yield (
            f"a layer with all its experts has {billions:.2f} B parameters: FSDP2 and ZeRO-3 gather it whole, "
            f"{gib:.1f} GiB in bf16, twice while the next is fetched. Expert parallelism, which public runs of "
            "the largest mixtures use, is not an engine here"
        )
        yield (
            "experts are fused tensors: adapters fit on the other linear layers only, and 4-bit loading leaves the "
            "experts in 16 bits"
        )


def _price_notes(question: Question) -> Iterator[str]:
    """Which GPUs have no price, so that none is left out or preferred in silence."""
    prices, what = question.prices, "purchase price" if question.buy else "rent price"
    price = prices.own if question.buy else prices.rent
    asked = {o.gpu.name: o.gpu for o in question.offers if o.gpu.kind == "cuda"}
    unknown = [g.name for g in (asked if question.offers else catalogue()).values() if price(g) is None]
    if not unknown:
        return
    if question.offers:
        yield f"no {what} of {', '.join(unknown)} is known, so no cost is shown: give one with --prices FILE"
    else:
        yield f"not searched, for no {what} is known (give one with --prices FILE): {', '.join(unknown)}"


def catalogue_offers(question: Question) -> Iterator[Offer]:
    """Every GPU with a price, in counts that fill cards, hosts and nodes."""
    for gpu in catalogue().values():
        priced = question.prices.own(gpu) if question.buy else question.prices.rent(gpu)
        if priced is None:
            continue
        for count in COUNTS:
            if count > question.most_gpus:
                break
            alone = gpu.form == "desktop" or gpu.gpus_per_node == 1  # not sold as clusters
            if count > gpu.gpus_per_node and (alone or count % gpu.gpus_per_node):
                continue
            yield Offer(gpu, count, min(count, gpu.gpus_per_node))


class _Search:
    """One method on one offer, as a cache key: equal when no stack and no estimate can differ.

    Prices, wishes, epochs and the amount of data (but for the batch it asks for) do not matter here, so that
    changing them searches nothing again.
    """

    __slots__ = ("best_only", "method", "offer", "question", "values")

    def __init__(self, question: Question, method: str, offer: Offer) -> None:
        self.question, self.method, self.offer = question, method, offer
        q = question
        self.best_only = q.best_only or not q.offers
        self.values = (
            id(q.shape), id(offer.gpu), offer.count, offer.gpus_per_node, method,
            global_batch(q, method, offer), q.sequence_length, q.lora_rank, q.lora_targets, q.master_weights,
            q.micro_batch_size, q.activation_checkpointing, self.best_only,
        )  # fmt: skip

    def __hash__(self) -> int:
        return hash(self.values)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Search) and other.values == self.values


def _best_of(
    question: Question, method: str, offer: Offer
) -> tuple[list[Option], dict[str, tuple[int, Stack]], int]:
    """The fastest fitting stack of every engine; the smallest need of every engine; how many were tried."""
    plans, smallest, tried = _search(_Search(question, method, offer))
    return [_option(question, plan) for plan in plans], smallest, tried


@lru_cache(maxsize=4096)
def _search(asked: _Search) -> tuple[tuple[Plan, ...], dict[str, tuple[int, Stack]], int]:
    question, method, offer = asked.question, asked.method, asked.offer
    plans: list[Plan] = []
    smallest: dict[str, tuple[int, Stack]] = {}
    capacity, tried = offer.gpu.usable_bytes, 0
    best_only = asked.best_only
    found_grids = grids(question, method, offer)
    for grid in sorted(found_grids, key=lambda g: simplicity(g.base)) if best_only else found_grids:
        tried += len(grid)
        engine = engine_name(grid.base)
        offloads = grid.base.offload_parameters != "none" or grid.base.offload_optimizer != "none"
        floor = least_possible_bytes(question.shape, method, grid.base.sharding, grid.base.dp_shard)
        if best_only and floor > capacity and not offloads:
            continue  # what it would need is not asked
        # Where only the best engine counts: not simpler than the one found, it must be faster by what counts.
        rival = plans[0].speed.step_seconds if best_only and plans and plans[0].verdict == "fits" else inf
        found = fastest(grid, offer, 0.97 * rival)
        if found is None:
            continue
        if not found.sure:
            smallest[engine] = found.memory.needed_bytes, found.stack
            if verdict(found.memory, capacity) == "does not fit":
                continue
        speed = estimate_speed(question.shape, offer.gpu, found.stack)
        plan = Plan(question.shape, offer, found.stack, found.memory, speed, capacity)
        if not found.sure and not plan.host_fits:
            continue
        if not best_only or not plans:
            plans.append(plan)
        elif _before(plan) < _before(plans[0]):
            plans = [plan]
    return tuple(plans), smallest, tried


def _before(plan: Plan) -> tuple[bool, int, int]:
    """Of two engines on one offer the sure one, then the faster, then the simpler."""
    return plan.verdict != "fits", bucket(plan.speed.step_seconds), simplicity(plan.stack)


def _option(question: Question, plan: Plan) -> Option:
    data, length, batch = question.data, question.sequence_length, plan.stack.global_batch_size
    if data.steps_at is not None:
        steps: int | None = data.steps_at(length, batch)
    else:
        steps = planned_steps(data.sequences(length), batch, question.epochs, None)
    plan = replace(plan, steps=steps, fill=fill_of(question.data, question.sequence_length))
    if plan.seconds is None or plan.low_seconds is None or plan.high_seconds is None:
        return Option(plan, None, None, None, None, None)
    start = start_seconds(plan)
    seconds, low, high = plan.seconds + start, plan.low_seconds + start, plan.high_seconds + 2 * start
    cost = estimate_cost(plan.offer, seconds, low, high, question.prices, question.buy)
    return Option(plan, cost, seconds, low, high, energy_kwh(plan.offer, seconds))


def start_seconds(plan: Plan) -> float:
    """Start of the processes and reading the weights from disk, each node its own copy."""
    size = 2.0 * plan.shape.total_parameters
    return START_SECONDS + size / plan.offer.gpu.disk_read_bytes_per_second


def _with_wish(question: Question, option: Option) -> Option:
    missed = []
    if question.budget_usd is not None:
        spent = _budgeted_usd(question, option)
        if spent is None:
            missed.append("no price is known, so the budget cannot be checked")
        elif spent > question.budget_usd:
            missed.append(f"{'is' if question.buy else 'costs'} ${spent:,.0f} of ${question.budget_usd:,.0f}")
    if question.deadline_seconds is not None:
        if option.seconds is None:
            missed.append("without data the deadline cannot be checked")
        elif option.seconds > question.deadline_seconds:
            missed.append(f"takes {option.seconds / question.deadline_seconds:.1f} x the deadline")
    return replace(option, missed="; ".join(missed)) if missed else option


def _budgeted_usd(question: Question, option: Option) -> float | None:
    """What a budget is compared with: the job's cost, or, for who buys, the price of the hardware."""
    if question.buy:
        each = question.prices.purchase_usd(option.plan.offer.gpu)
        return None if each is None else each * option.plan.offer.count
    return None if option.cost is None else option.cost.usd


def _rank(question: Question, preferred: tuple[str, ...], option: Option) -> tuple[Any, ...]:
    """Wishes met, then sure fits, then quality asked for first, then price (or time where no price is asked).

    Where offers compete by price, those without one come last of their method.
    """
    plan = option.plan
    many = len(question.offers) != 1
    no_price = many and option.cost is None and option.seconds is not None
    money = option.cost.usd if option.cost is not None and many else 0.0
    per_token = plan.speed.step_seconds / plan.speed.tokens_per_step
    return (
        bool(option.missed), plan.verdict != "fits", preferred.index(plan.stack.method), no_price, bucket(money),
        bucket(per_token), simplicity(plan.stack), per_token,
    )  # fmt: skip


def preference(question: Question) -> tuple[str, ...]:
    """Methods in the order recommended: LoRA to steer a model, all weights to teach it."""
    order = ("lora", "qlora", "full") if question.goal == "steer" else METHODS
    return tuple(m for m in order if m in question.methods)


def pareto(options: Sequence[Option]) -> tuple[Option, ...]:
    """Options that no other beats in both time and cost; fastest first."""
    known = [o for o in options if o.cost is not None and o.seconds is not None and not o.missed]
    front: list[Option] = []
    for option in sorted(known, key=lambda o: (o.seconds, o.cost.usd if o.cost else 0.0)):
        if not front or option.cost.usd < 0.999 * front[-1].cost.usd:  # type: ignore[union-attr]
            front.append(option)
    return tuple(front)
