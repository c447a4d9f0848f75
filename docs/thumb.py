"""The rules of thumb in docs/memory.md, derived from the estimator: `python docs/refresh.py` writes them anew."""

import re
from dataclasses import replace
from pathlib import Path

from shardwise.estimate.memory.formula import estimate_memory
from shardwise.estimate.memory.states import held
from shardwise.estimate.memory.trainer import OURS
from shardwise.estimate.stack import Stack
from shardwise.facts.catalogue import named_shape
from shardwise.facts.model import ModelShape
from shardwise.units import GB

PAGE = Path(__file__).with_name("memory.md")
BEGIN, END = "<!-- rules of thumb, by docs/refresh.py -->", "<!-- end of the rules of thumb -->"
RANKS = (8, 64)


def _model(name: str) -> ModelShape:
    found = named_shape(name)
    assert found is not None
    return found


def _gb(size: float) -> str:
    return f"{size / GB:,.0f} GB" if size >= 10 * GB else f"{size / GB:.1f} GB"


def _peak(model: ModelShape, stack: Stack) -> float:
    return estimate_memory(model, stack).allocated_bytes


def _held(model: ModelShape, stack: Stack) -> float:
    """States of one rank with the gradients of the backward pass, without activations and buffers."""
    states = held(model, replace(stack, gradient_accumulation_steps=1), OURS)
    split = stack.sharding in ("zero2", "zero3")
    gradients = 2 * model.total_parameters / (stack.dp_shard if split else 1)
    return states.weights + states.masters + states.optimizer + gradients


def rules() -> list[tuple[str, str, str]]:
    """(rule, what the estimator says, where it misleads)."""
    seven, eight, seventy = (_model(n) for n in ("Llama-2-7B", "Llama-3.1-8B", "Llama-2-70B"))
    full = Stack(method="full", activation_checkpointing="full", sequence_length=2048)
    lora, qlora = (replace(full, method=m, sequence_length=512) for m in ("lora", "qlora"))
    p7, p70 = seven.total_parameters, seventy.total_parameters
    with_masters = _held(seven, full)
    without = with_masters - 4 * p7
    whole = replace(full, sharding="fsdp2", world_size=16, gpus_per_node=8)
    per_gpu = _peak(seventy, whole)
    rows = [
        (
            "7B full = 84 GB or 112 GB",
            f"weights 2 + gradients 2 + states 8 = {without / p7:.0f} bytes x {p7 / 1e9:.2f}e9 = {_gb(without)}; and "
            f"masters 4 = {with_masters / p7:.0f} bytes: {_gb(with_masters)}",
            f"12 bytes leave out the fp32 masters. A step comes on top: {_gb(_peak(seven, full))} for 2,048 tokens "
            f"with recomputation, {_gb(_peak(seven, _bare(full, 16384)))} for 16,384 without",
        ),
        (
            "70B full = 840 GB",
            f"12 bytes x {p70 / 1e9:.2f}e9 = {_gb(12 * p70)}, 16 bytes: {_gb(16 * p70)}",
            "it is a sum over all GPUs, and buffers, gathered layers and activations are per GPU: FSDP2 on 16 takes "
            f"{_gb(per_gpu)} on each for 2,048 tokens with recomputation, {_gb(16 * per_gpu)} in all",
        ),
        (
            "LoRA at 7B = 16 to 18 GB",
            f"2 bytes x {p7 / 1e9:.2f}e9 = {_gb(2 * p7)} and adapters of rank 16 with their states: "
            f"{_gb(_peak(seven, lora))} for 512 tokens with recomputation, "
            f"{_gb(_peak(seven, replace(lora, sequence_length=4096)))} for 4,096",
            f"without recomputation 4,096 tokens take {_gb(_peak(seven, _bare(lora, 4096)))}; with all logits of "
            f"Llama 3's 128,000 words, {_gb(_peak(eight, _bare(lora, 4096, 'full')))} "
            f"(chunked: {_gb(_peak(eight, _bare(lora, 4096)))})",
        ),
        (
            "QLoRA at 7B = 6 to 10 GB",
            f"0.516 bytes x {seven.quantised_parameters / 1e9:.2f}e9 + 2 bytes x "
            f"{(p7 - seven.quantised_parameters) / 1e9:.2f}e9 = {_gb(held(seven, qlora, OURS).weights)}: "
            f"{_gb(_peak(seven, qlora))} for 512 tokens with recomputation, "
            f"{_gb(_peak(seven, replace(qlora, sequence_length=4096)))} for 4,096",
            f"embedding and head stay in 16 bits: the weights of Llama 3's 8B take "
            f"{_gb(held(eight, qlora, OURS).weights)}; "
            f"without recomputation 4,096 tokens take {_gb(_peak(seven, _bare(qlora, 4096)))}",
        ),
    ]
    return [*rows, *_zero(seven, full)]


def _bare(stack: Stack, length: int, loss: str = "chunked") -> Stack:
    return replace(stack, sequence_length=length, activation_checkpointing="none", loss=loss)  # type: ignore[arg-type]


def _zero(model: ModelShape, full: Stack) -> list[tuple[str, str, str]]:
    """What the stages save of 16 bytes per parameter, on 8 and on 64 ranks."""
    one = _held(model, full)

    def split(stage: str, ranks: int) -> Stack:
        return replace(full, sharding=stage, world_size=ranks, gpus_per_node=8)  # type: ignore[arg-type]

    def saved(stage: str) -> str:
        shares = (one / _held(model, split(stage, n)) for n in RANKS)
        return " and ".join(f"{share:.1f}x on {n}" for share, n in zip(shares, RANKS, strict=True))

    def peaks(stage: str) -> str:
        sizes = (_gb(_peak(model, split(stage, n))) for n in RANKS)
        return " and ".join(f"{size} on {n}" for size, n in zip(sizes, RANKS, strict=True))

    small = replace(split("zero2", 64), reduce_bucket_size=50_000_000)
    return [
        (
            "ZeRO-1 saves 4x",
            f"16 bytes become 4 + 12/n: {saved('zero1')} ranks",
            f"weights and gradients stay whole, never below 4 bytes. Peaks of 7B: {peaks('zero1')} ranks",
        ),
        (
            "ZeRO-2 saves 8x",
            f"16 bytes become 2 + 14/n: {saved('zero2')} ranks",
            f"never below 2 bytes, and reduction buckets of 5e8 elements take up to 5 GB: peaks of 7B are "
            f"{peaks('zero2')} ranks, with buckets of 5e7 {_gb(_peak(model, small))} on 64",
        ),
        (
            "ZeRO-3 is linear in GPUs",
            f"16/n bytes: {saved('zero3')} ranks",
            f"what is gathered and buffers do not shrink: peaks of 7B are {peaks('zero3')} ranks, "
            f"with FSDP2 {peaks('fsdp2')}",
        ),
    ]


def table() -> str:
    """Markdown."""
    lines = ["| rule | by the estimator | misleads when |", "|---|---|---|"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rules())])


def renewed(text: str) -> str:
    """The page with the table between its two marks written anew."""
    return re.sub(
        f"{re.escape(BEGIN)}\n.*?{re.escape(END)}", lambda _: f"{BEGIN}\n{table()}\n{END}", text, flags=re.S
    )
