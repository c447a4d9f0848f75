"""A recipe with `auto` in it, a model and a machine -> the same recipe with every `auto` decided, and its plan."""

from dataclasses import replace
from typing import Any

from shardwise.errors import RecipeError, RuleError
from shardwise.estimate.memory.formula import estimate_memory
from shardwise.estimate.speed import estimate_speed
from shardwise.estimate.stack import Stack
from shardwise.facts.gpus import Offer
from shardwise.facts.machine import detect_machine
from shardwise.facts.model import ModelShape
from shardwise.facts.precision import rates_here
from shardwise.plan.model import Choice, DataFacts, Plan, fill_of, planned_steps
from shardwise.plan.question import engine_name
from shardwise.plan.saving import save_every
from shardwise.plan.sharding import Chosen, choose, engine_section
from shardwise.recipe.schema import Recipe
from shardwise.rules import Situation

ADAPTER_RATE, FULL_RATE = 2e-4, 1e-5
# Tokens per optimizer step that `auto` aims at: what published recipes of 1B to 70B models use.
ADAPTER_TOKENS, FULL_TOKENS, CPU_TOKENS = 32_768, 131_072, 4_096
FEWEST_STEPS = 20  # of an epoch, before a batch is made smaller
_LENGTHS = (256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
_DEFAULT_LENGTH = 2048


class _Choices:
    """Collects decisions with their reasons."""

    def __init__(self) -> None:
        self.made: list[Choice] = []

    def auto(self, key: str, asked: Any, value: Any, why: str) -> Any:
        """`value` where `auto` was asked; what was asked otherwise."""
        if asked != "auto":
            return asked
        self.made.append(Choice(key, str(value), why))
        return value


def resolve(
    recipe: Recipe,
    shape: ModelShape,
    offer: Offer,
    data: DataFacts | None = None,
    where: Situation | None = None,
) -> tuple[Recipe, Plan]:
    """Decide every `auto` of `recipe` for `shape` on `offer`.

    Keys that a person wrote are kept as they are; whether the result fits is in the plan's verdict. `where` is the
    installation that will run it: `engine.name: auto` takes nothing that is not legal there.

    Raises RecipeError for a batch that cannot be divided, RuleError for a device that is not there.
    """
    data = data or DataFacts()
    made = _Choices()
    device, ranks = _device(recipe, offer, made)
    length = _length(recipe, shape, data, made)
    precision = _precision(recipe, offer, device, made)
    optimizer = _optimizer(recipe, shape, made)
    sequences = data.sequences(length)
    draft = Stack(
        method=recipe.method,
        world_size=ranks,
        gpus_per_node=min(ranks, offer.gpus_per_node),
        sequence_length=length,
        precision=precision,
        master_weights=recipe.optimizer.master_weights,
        optimizer=recipe.optimizer.name,
        clip_gradients=recipe.optimizer.max_grad_norm is not None,
        attention="sdpa" if recipe.model.attention == "auto" else recipe.model.attention,
        loss=made.auto("training.loss", recipe.training.loss, "chunked",
                       "the same loss with logits of a few tokens at a time"),
        compile=recipe.training.compile,
        lora_rank=recipe.lora.rank,
        lora_targets=recipe.lora.targets,
        lora_dropout=recipe.lora.dropout,
        dora=recipe.lora.dora,
        double_quantization=recipe.quantization.double_quantization,
        device=device,
        labelled_share=data.labelled_share,
        document_tokens=data.document_tokens,
    )  # fmt: skip
    batch = _global_batch(recipe, draft, sequences, made)
    chosen = choose(recipe, shape, offer, draft, batch, where)
    stack = _told(recipe, chosen, made)
    if data.labelled_at is not None:
        sizes = (length, stack.global_batch_size, stack.micro_batch_size, stack.world_size)
        stack = replace(stack, labelled_tokens=data.labelled_at(*sizes))
    steps = _steps(recipe, stack, data, made)
    speed = estimate_speed(shape, offer.gpu, stack)
    evaluate = made.auto("evaluation.every_steps", recipe.evaluation.every_steps, max(1, (steps or 100) // 10),
                         "ten times in a run")  # fmt: skip
    background = recipe.checkpoint.background
    save, why = save_every(shape, stack, offer.gpu, speed.step_seconds, steps, evaluate,
                           device == "cuda" if background is None else background)  # fmt: skip
    save = made.auto("checkpoint.every_steps", recipe.checkpoint.every_steps, save, why)
    filled = _fill(recipe, stack, optimizer, (evaluate, save), data, made)
    memory = estimate_memory(shape, stack)
    plan = Plan(
        shape=shape,
        offer=offer,
        stack=stack,
        memory=memory,
        speed=speed,
        capacity_bytes=offer.gpu.usable_bytes,
        steps=steps,
        fill=fill_of(data, length),
        choices=tuple(made.made),
        notes=(*shape.notes, *offer.notes, *chosen.notes, *memory.notes),
    )
    return filled, plan


def _device(recipe: Recipe, offer: Offer, made: _Choices) -> tuple[Any, int]:
    here = offer.gpu.kind
    device = made.auto("engine.device", recipe.engine.device, here, f"the best there is: {offer.gpu.name}")
    if device != here and device != "cpu":
        raise RuleError(
            f"engine.device is {device}, but the plan is for {offer.name}",
            "that device is not there",
            f"set engine.device: {here}, or leave it on auto",
        )
    ranks = offer.count if here == "cuda" and device == here else 1
    ranks = made.auto("engine.processes", recipe.engine.processes, ranks, "one rank per device")
    if device == "cuda" and ranks > offer.count:
        raise RuleError(
            f"engine.processes is {ranks}, but there are {offer.count} GPUs",
            "every rank needs a GPU of its own",
            f"set engine.processes: {offer.count}",
        )
    if recipe.engine.name == "single" and ranks > 1:
        if recipe.engine.processes == "auto":
            made.made[-1] = Choice("engine.processes", "1", "engine single is one rank")
            return device, 1
        raise RuleError(
            f"engine single with {ranks} processes", "it is one rank on one device",
            "set engine.name: auto, ddp, fsdp2 or deepspeed",
        )  # fmt: skip
    return device, ranks


def _length(recipe: Recipe, shape: ModelShape, data: DataFacts, made: _Choices) -> int:
    limit = shape.max_position_embeddings
    if data.longest_tokens:
        fitting = [n for n in _LENGTHS if n >= min(data.longest_tokens, limit)]
        length = min(fitting[0] if fitting else _LENGTHS[-1], limit)
        why = f"holds the longest row ({data.longest_tokens:,} tokens)"
        if data.longest_tokens > limit:
            why = f"the model was built for {limit:,}; longer rows are cut (data.overlong)"
    else:
        length, why = min(_DEFAULT_LENGTH, limit), "usual for fine-tuning; the rows were not looked at"
    return int(made.auto("data.sequence_length", recipe.data.sequence_length, length, why))


def _precision(recipe: Recipe, offer: Offer, device: str, made: _Choices) -> Any:
    machine = detect_machine()
    rates = rates_here(machine.threads) if device == "cpu" else None
    if rates is not None:
        value = rates.faster
        why = (
            f"measured here on {rates.measured} in {rates.seconds:.1f} s: products run at "
            f"{rates.bf16_flops_per_second / 1e9:,.0f} GFLOP/s in bf16, "
            f"{rates.fp32_flops_per_second / 1e9:,.0f} in fp32"
        )
    elif device == "cpu" and machine.has_fast_bf16:
        value, why = "bf16", "this processor has bf16 matrix instructions; fp32 master weights keep it exact"
    elif device == "cpu":
        value, why = "fp32", "this processor has no bf16 matrix instructions, without which fp32 is faster"
    elif offer.gpu.has_bf16:
        value, why = "bf16", "half the memory, and this device has it; fp32 master weights keep it exact"
    else:
        value, why = "fp32", f"{offer.gpu.name} has no bf16"
    return made.auto("training.precision", recipe.training.precision, value, why)


def _optimizer(recipe: Recipe, shape: ModelShape, made: _Choices) -> float:
    full = recipe.method == "full"
    rate = FULL_RATE if full else ADAPTER_RATE
    why = "usual for training all weights" if full else "usual for adapters"
    return float(made.auto("optimizer.learning_rate", recipe.optimizer.learning_rate, rate, why))


def _global_batch(recipe: Recipe, draft: Stack, sequences: int | None, made: _Choices) -> int:
    """Sequences per step, a multiple of the ranks. Raises RecipeError when the person's numbers cannot be."""
    asked, ranks = recipe.training.global_batch_size, draft.world_size
    micro = recipe.training.micro_batch_size
    unit = ranks * (micro if isinstance(micro, int) else 1)
    if asked != "auto":
        if asked % unit:
            below, above = asked - asked % unit, asked + unit - asked % unit
            parts = f"micro_batch_size {micro} x " if isinstance(micro, int) else ""
            raise RecipeError(
                f"training.global_batch_size = {asked} cannot be split over {parts}{ranks} ranks",
                f"it must be a multiple of {unit}",
                f"use {f'{below} or ' if below else ''}{above}",
            )
        return int(asked)
    aim = CPU_TOKENS if draft.device != "cuda" else FULL_TOKENS if recipe.method == "full" else ADAPTER_TOKENS
    wanted = max(1, aim // draft.sequence_length)
    why = f"about {aim:,} tokens per step"
    if sequences is not None and wanted > sequences // FEWEST_STEPS:
        wanted = max(1, sequences // FEWEST_STEPS)
        why = f"small data ({sequences} sequences): at least {FEWEST_STEPS} steps per epoch where possible"
    value = max(unit, wanted - wanted % unit)
    return int(made.auto("training.global_batch_size", asked, value, why))


def _told(recipe: Recipe, chosen: Chosen, made: _Choices) -> Stack:
    """The chosen stack, with every decision in it noted."""
    stack, open_name = chosen.stack, recipe.engine.name == "auto"
    engine = "deepspeed" if stack.sharding.startswith("zero") else stack.sharding
    made.auto("engine.name", recipe.engine.name, engine, chosen.engine_why)
    if open_name and engine == "deepspeed":
        why = f"part of {engine_name(stack)}"
        made.made.append(Choice("engine.deepspeed.zero_stage", stack.sharding[-1], why))
        for key in ("offload_optimizer", "offload_parameters"):
            if getattr(stack, key) != "none":
                made.made.append(Choice(f"engine.deepspeed.{key}", getattr(stack, key), why))
    if open_name and engine == "fsdp2" and stack.offload_parameters == "cpu":
        made.made.append(Choice("engine.fsdp2.cpu_offload", "true", f"part of {engine_name(stack)}"))
    asked, why = recipe.training, chosen.size_why
    made.auto("training.micro_batch_size", asked.micro_batch_size, stack.micro_batch_size, why)
    kind = stack.activation_checkpointing
    why = "the fewest layers with which it fits" if isinstance(kind, int) else why
    made.auto("training.activation_checkpointing", asked.activation_checkpointing, kind, why)
    return stack


def _steps(recipe: Recipe, stack: Stack, data: DataFacts, made: _Choices) -> int | None:
    """Optimizer steps: the trainer's own count where the rows are known."""
    length, batch, training = stack.sequence_length, stack.global_batch_size, recipe.training
    if data.steps_at is not None:
        steps: int | None = data.steps_at(length, batch)
    else:
        sequences = None if training.max_tokens is None else -(-training.max_tokens // length)
        steps = planned_steps(data.sequences(length), batch, training.epochs, training.max_steps, sequences)
    if training.max_tokens is not None:
        why = f"training.max_tokens = {training.max_tokens:,}; the sequence that reaches it is the last one"
        made.made.append(Choice("optimizer steps", f"{steps:,}", why))
    return steps


def _fill(
    recipe: Recipe, stack: Stack, rate: float, every: tuple[int, int], data: DataFacts, made: _Choices
) -> Recipe:
    """The recipe with every decision written in. `every`: steps between evaluations, and between saves."""
    training = recipe.training
    epochs = training.epochs
    if epochs is None and training.max_steps is None and training.max_tokens is None:
        epochs = 1.0
        made.made.append(Choice("training.epochs", "1", "no epochs, max_steps or max_tokens is given"))
    update: dict[str, Any] = {
        "model": {"attention": stack.attention},
        "data": {"sequence_length": stack.sequence_length},
        "optimizer": {"learning_rate": rate},
        "training": {
            "epochs": epochs,
            "global_batch_size": stack.global_batch_size,
            "micro_batch_size": stack.micro_batch_size,
            "precision": stack.precision,
            "activation_checkpointing": stack.activation_checkpointing,
            "loss": stack.loss,
        },
        "engine": engine_section(recipe, stack),
        "evaluation": {"every_steps": every[0]},
        "checkpoint": {"every_steps": every[1]},
    }
    if recipe.data.validation == "auto" and data.rows is not None:
        held = 0 if data.rows < 20 else min(200, max(1, data.rows * 5 // 100))
        held = held if data.held_out is None else data.held_out
        update["data"]["validation"] = made.auto(
            "data.validation", "auto", held, "5 % of the rows, at most 200"
        )
    return _updated(recipe, update)


def _updated(section: Any, changes: dict[str, Any]) -> Any:
    """A frozen pydantic section with nested changes."""
    values = {
        key: _updated(getattr(section, key), value) if isinstance(value, dict) else value
        for key, value in changes.items()
    }
    return section.model_copy(update=values)
