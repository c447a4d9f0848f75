"""A recipe traced: the choices it left open filled in and said aloud, the trace, and the formula beside it."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.errors import ModelError, RecipeError
from shardwise.estimate.memory.formula import estimate_memory
from shardwise.estimate.memory.terms import TERMS, MemoryEstimate
from shardwise.estimate.stack import Stack
from shardwise.facts.model import read_model
from shardwise.recipe.schema import AUTO, Recipe
from shardwise.training.model import ModelFolder
from shardwise.training.trace.step import Traced, trace
from shardwise.units import format_bytes


@dataclass(frozen=True)
class RecipeTrace:
    """`estimate` is the formula's answer to the same question. `allocations` are of one step."""

    traced: Traced
    estimate: MemoryEstimate
    stack: Stack
    seconds: float

    @property
    def allocations(self) -> int:
        return sum(event[0] == "a" for event in self.traced.events)


def trace_recipe(
    recipe: Recipe, processes: int | None, device: str, say: Callable[[str], None]
) -> RecipeTrace:
    """Trace one step. Each micro-batch is `micro_batch_size` documents of `sequence_length` tokens.

    Raises ModelError without a local model folder, RecipeError where a needed key is `auto`.
    """
    folder = Path(recipe.model.source).expanduser()
    if not (folder / "config.json").is_file():
        raise ModelError(
            f"'{recipe.model.source}' is not a local model folder",
            "a trace builds the model from its config.json; weights are not read",
            "put the model's config.json into a folder and set model.source to that folder",
        )
    recipe, ranks = _decided(recipe, processes, device, say)
    length, size = recipe.data.sequence_length, recipe.training.micro_batch_size
    assert length != AUTO and size != AUTO
    total = recipe.training.global_batch_size
    steps = 1 if total == AUTO else total // (size * ranks)
    if steps < 1 or (total != AUTO and total != steps * size * ranks):
        raise RecipeError(
            f"global_batch_size {total} is not micro_batch_size {size} x {ranks} ranks x a whole number",
            "every rank runs the same number of micro-batches",
            f"use a multiple of {size * ranks}",
        )
    began = time.perf_counter()
    traced = trace(recipe, ModelFolder(folder, recipe), [(length,) * size] * steps, ranks, device, say)
    stack = stack_of(recipe, ranks, steps, device)
    estimate = estimate_memory(read_model(str(folder)), stack)
    return RecipeTrace(traced, estimate, stack, time.perf_counter() - began)


def _decided(
    recipe: Recipe, processes: int | None, device: str, say: Callable[[str], None]
) -> tuple[Recipe, int]:
    """Fill what the recipe leaves open with plain values, and say each."""
    if recipe.data.sequence_length == AUTO:
        raise RecipeError(
            "data.sequence_length is auto",
            "a trace reads no data, so it cannot choose a length",
            "add --set data.sequence_length=2048",
        )
    asked = recipe.engine.processes
    ranks = processes or (1 if asked == AUTO else asked)
    training, engine = recipe.training, recipe.engine
    filled: dict[str, Any] = {}
    for key, value in (
        ("micro_batch_size", 1),
        ("precision", "bf16" if device == "cuda" else "fp32"),
        ("activation_checkpointing", "none"),
        ("loss", "chunked"),
    ):
        if getattr(training, key) == AUTO:
            filled[key] = value
            say(f"training.{key} is auto: traced with {value}")
    training = training.model_copy(update=filled)
    if engine.name == AUTO:
        name = "single" if ranks == 1 else "fsdp2"
        say(f"engine.name is auto: traced with {name}")
        engine = engine.model_copy(update={"name": name})
    optimizer = recipe.optimizer
    if optimizer.learning_rate == AUTO:
        optimizer = optimizer.model_copy(update={"learning_rate": 1e-4})  # no memory depends on it
    return recipe.model_copy(update={"training": training, "engine": engine, "optimizer": optimizer}), ranks


def stack_of(recipe: Recipe, ranks: int, steps: int, device: str) -> Stack:
    """What the planner is asked for the step that `trace_recipe` traces. Every choice of the recipe is made."""
    training, fsdp2 = recipe.training, recipe.engine.fsdp2
    offload: Any = "cpu" if recipe.engine.name == "fsdp2" and fsdp2.cpu_offload else "none"
    sharding: Any = recipe.engine.name
    zero = recipe.engine.deepspeed
    places: dict[str, Any] = {"offload_optimizer": offload, "offload_parameters": offload}
    if sharding == "deepspeed":
        sharding = f"zero{zero.zero_stage}"
        places = {"offload_optimizer": zero.offload_optimizer, "offload_parameters": zero.offload_parameters}
        places |= {
            key: value
            for key in (
                "reduce_bucket_size",
                "allgather_bucket_size",
                "prefetch_bucket_size",
                "param_persistence_threshold",
                "max_live_parameters",
            )
            if (value := getattr(zero, key)) != AUTO
        }
    size, length = training.micro_batch_size, recipe.data.sequence_length
    assert size != AUTO and length != AUTO and training.precision != "auto"
    assert training.activation_checkpointing != "auto" and training.loss != "auto"
    return Stack(
        method=recipe.method,
        sharding=sharding,
        world_size=ranks,
        gpus_per_node=min(8, ranks),
        dp_replicate=fsdp2.dp_replicate,
        reshard_after_forward=fsdp2.reshard_after_forward,
        **places,
        micro_batch_size=size,
        sequence_length=length,
        labelled_tokens=size * (length - 1),
        documents=size,
        gradient_accumulation_steps=steps,
        precision=training.precision,
        master_weights=recipe.optimizer.master_weights,
        optimizer=recipe.optimizer.name,
        activation_checkpointing=training.activation_checkpointing,
        loss=training.loss,
        lora_rank=recipe.lora.rank,
        lora_targets=recipe.lora.targets,
        dora=recipe.lora.dora,
        double_quantization=recipe.quantization.double_quantization,
        device="cuda" if device == "cuda" else "cpu",
    )


def trace_text(result: RecipeTrace) -> str:
    phase, peak = result.traced.peak
    lines = [
        f"peak {format_bytes(peak.bytes)} allocated on rank 0 of {result.stack.world_size}, in the {phase} phase",
        f"formula says {format_bytes(result.estimate.allocated_bytes)} "
        f"({result.estimate.allocated_bytes / peak.bytes - 1:+.1%})",
        "",
        "phase       " + "bytes".rjust(12),
    ]
    lines += [f"{name:<12}{format_bytes(p.bytes):>12}" for name, p in result.traced.peaks.items()]
    if result.traced.copied_bytes:
        copied = format_bytes(result.traced.copied_bytes)
        lines += ["", f"a save in the background is written from a copy of {copied} in host memory per rank"]
    lines += ["", "at the peak"]
    lines += [f"  {t:<16}{format_bytes(peak.terms[t]):>12}" for t in TERMS if peak.terms.get(t)]
    lines += ["", "by line of source and module, the largest", *_part_lines(result.traced, phase)]
    lines += ["", f"{result.allocations:,} allocations in one step, traced in {result.seconds:.1f} s", ""]
    return "\n".join(lines)


LARGEST_PARTS = 12


def _part_lines(traced: Traced, phase: str) -> list[str]:
    """Bytes, tensors, term and where they were made."""
    lines = []
    for size, count, birth in traced.parts(phase)[:LARGEST_PARTS]:
        where = f"{birth.place.source}  {birth.place.module}".rstrip() if birth.place else "before the step"
        lines.append(f"  {format_bytes(size):>12}  {count:>4} x {birth.name:<16} {where}")
    return lines


def trace_json(result: RecipeTrace) -> dict[str, Any]:
    phase, peak = result.traced.peak
    return {
        "peak_allocated_bytes": peak.bytes,
        "peak_phase": phase,
        "phases": {n: {"bytes": p.bytes, "terms": p.terms} for n, p in result.traced.peaks.items()},
        "peak_parts": [
            {
                "bytes": size,
                "tensors": count,
                "term": birth.name,
                "operation": birth.op,
                "source": birth.place.source if birth.place else "",
                "module": birth.place.module if birth.place else "",
            }
            for size, count, birth in result.traced.parts(phase)
        ],
        "save_copy_bytes": result.traced.copied_bytes,
        "formula_allocated_bytes": result.estimate.allocated_bytes,
        "world_size": result.stack.world_size,
        "allocations": result.allocations,
        "seconds": round(result.seconds, 2),
    }
