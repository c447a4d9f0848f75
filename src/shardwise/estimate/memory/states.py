"""What a rank holds between steps: weights, masters, optimizer states, kept gradients. Symbols in `Counts`."""

from dataclasses import dataclass
from functools import lru_cache

from shardwise.estimate.memory.shards import shards_of
from shardwise.estimate.memory.trainer import Trainer
from shardwise.estimate.stack import Stack
from shardwise.facts.model import ModelShape

# Bytes per element of a 4-bit matrix: half a byte, one fp32 scale per 64 elements; double quantisation keeps the
# scales in 8 bits with one fp32 per 256 of them (QLoRA, arXiv 2305.14314, section 3).
NF4_BYTES = 0.5 + 4 / 64
NF4_DOUBLE_BYTES = 0.5 + 1 / 64 + 4 / (64 * 256)
# bytes of optimizer states per trained element, and of the foreach temporaries while a bucket is updated
OPTIMIZER_STATES = {
    "adamw": 8.0,
    "adamw_8bit": 2.0 + 2 * 4 / 256,  # one byte each, one fp32 scale per 256 (arXiv 2110.02861)
    "paged_adamw_8bit": 2.0 + 2 * 4 / 256,
    "sgd": 4.0,
    "adafactor": 0.0,  # a row and a column per matrix: below 0.1 %
    "muon": 4.0,
}
UPDATE_TEMPORARIES = {"adamw": 4.0, "sgd": 0.0, "adafactor": 4.0, "muon": 4.0}
ZERO3_GROUP_ELEMENTS = 2**24  # engines/deepspeed_config.py
ZERO3_SUB_GROUP_ELEMENTS = 10**9  # sub_group_size of DeepSpeed unless told otherwise
OUR_BUCKET_ELEMENTS = 2**26  # our optimizer updates at most so many elements at once


@dataclass(frozen=True, slots=True)
class Counts:
    """Parameters of a model, split by what is trained and how the rest is stored."""

    total: int
    trained: int
    frozen_16bit: int
    frozen_4bit: int
    leftovers: int  # of frozen_16bit, what k-bit preparation casts to fp32: all of it
    largest: int  # trained elements of the largest single tensor


@lru_cache(maxsize=2048)
def counts(
    shape: ModelShape, method: str, rank: int, targets: str | tuple[str, ...], dora: bool, experts: bool
) -> Counts:
    """`experts`: expert matrices are quantised too (they are when each is a linear layer of its own)."""
    total = shape.total_parameters
    if method == "full":
        return Counts(total, total, 0, 0, 0, max(t.size for t in shape.tensors))
    trained = shape.lora_parameters(rank, targets, dora)
    four = shape.quantised_parameters + (shape.count("expert") if experts else 0) if method == "qlora" else 0
    largest = max(rank * max(t.shape[:2]) for t in shape.adapted(targets))
    return Counts(total, trained, total - four, four, total - four, largest)


def counts_of(shape: ModelShape, stack: Stack, quantised_experts: bool = False) -> Counts:
    """`counts` of a stack."""
    return counts(shape, stack.method, stack.lora_rank, stack.lora_targets, stack.dora, quantised_experts)


@dataclass(frozen=True, slots=True)
class Held:
    """Bytes one rank holds all the time, on the device and in host memory."""

    weights: int
    masters: int
    optimizer: int
    gradients: int  # those that live through the next forward
    host: int  # offloaded, this rank's part
    nvme: int
    paged: (
        int  # optimizer states in managed memory: on the device while there is room, no part of `optimizer`
    )
    update_elements: int  # elements the optimizer updates at once
    words: dict[str, str]


def held(shape: ModelShape, stack: Stack, trainer: Trainer) -> Held:
    """Bytes between steps on the fullest rank.

    ZeRO-1 splits optimizer states over the ranks, ZeRO-2 gradients too, ZeRO-3 and FSDP weights too
    (arXiv 1910.02054, section 3).
    """
    n = counts_of(shape, stack, trainer.quantised_experts)
    c = 2 if stack.precision == "bf16" else 4
    ranks = stack.dp_shard
    weight_shards = ranks if stack.sharding in ("fsdp2", "zero3") else 1
    state_shards = ranks if stack.sharding not in ("single", "ddp") else 1
    mine = shards_of(shape, stack, trainer, weight_shards)
    resident = trainer.weight_bytes or c
    four, packed, scales = four_bit_bytes(stack, trainer)
    frozen_bytes = 4 if trainer.fp32_leftovers else resident
    untied = shape.vocab_size * shape.hidden_size if trainer.unties and shape.tie_word_embeddings else 0
    head = shape.vocab_size * shape.hidden_size if trainer.quantised_head and n.frozen_4bit else 0
    frozen = (mine.frozen + (untied - head) / weight_shards) * frozen_bytes
    scaled = (n.frozen_4bit + head) / (weight_shards if trainer.sharded_scales else 1)
    frozen += (mine.four + head / weight_shards) * packed + scaled * scales
    # What ZeRO-1 and 2 split is one flat buffer: equal parts. Elsewhere a rank's own tensors are trained.
    trained = mine.trained if weight_shards == state_shards else -(-n.trained // state_shards)
    adapter = trainer.adapter_bytes or (c if stack.method != "full" else resident)
    mastered = trainer.masters and stack.master_weights and stack.precision == "bf16" and adapter == 2
    if stack.sharding == "fsdp2" and mastered:  # the shards are the fp32 masters; bf16 exists while gathered
        trained_weights, masters, mastered = 0.0, 4.0 * trained, True
    else:
        trained_weights, masters = float(adapter * mine.trained), 4.0 * trained if mastered else 0.0
    states = OPTIMIZER_STATES.get(stack.optimizer, 8.0) * trainer.state_bytes / 4 * trained
    accumulates = stack.gradient_accumulation_steps > 1 or trainer.gradients_alive
    grad_bytes = trainer.gradient_bytes or (
        4 if mastered or (stack.sharding in ("zero1", "zero2", "zero3") and trainer.masters) else adapter
    )
    grad_shards = ranks if stack.sharding in ("fsdp2", "zero2", "zero3") else 1
    gradients = float(grad_bytes * (trained if grad_shards > 1 else n.trained)) if accumulates else 0.0
    if trainer.flat_gradients and accumulates and stack.sharding == "fsdp2":
        whole = shards_of(shape, stack, trainer, 1)
        flat = whole.layer_frozen * shape.num_hidden_layers if trainer.flat_gradients == "whole" else 0
        gradients = float(grad_bytes * (n.trained + flat))
    if stack.sharding == "zero1" and accumulates and trainer.kernels:
        gradients = float((4 + c if c < 4 else 4) * n.trained)  # whole sums in fp32, and the weights' own
    if stack.sharding == "ddp" and not trainer.gradient_buckets:  # gradients are views of buckets that stay
        gradients = c * n.trained + (4 * n.trained if accumulates and mastered else 0)
    if n.frozen_4bit:  # each matrix has a code table of 16 fp32; double quantisation one of 256 and an offset
        matrices = sum(t.count for t in shape.tensors if t.kind == "linear")
        frozen += matrices * (512 + (1024 + 512 if stack.double_quantization else 0))
    weights = frozen + trained_weights
    copies = 2 * shape.vocab_size * shape.hidden_size if trainer.trained_embeddings else 0
    if copies:  # weights, states and gradients in the dtype of the base
        weights += resident * copies / weight_shards
        states += 2 * resident * copies / state_shards
        gradients += resident * copies / grad_shards if accumulates else 0
    host = nvme = 0.0
    if stack.offload_parameters != "none":
        host, weights = host + weights, 0.0
        if stack.sharding == "fsdp2":
            host, masters = host + masters, 0.0
    if stack.offload_optimizer != "none":
        moved = masters + states + gradients
        masters = states = gradients = 0.0
        if stack.offload_optimizer == "nvme":
            nvme += moved
        else:
            host += moved
    paged, states = (states, 0.0) if _paged(stack, trainer) else (0.0, states)
    at_once = trainer.whole_step or stack.sharding in ("zero1", "zero2", "zero3")
    if stack.sharding == "zero3" and trainer.kernels:
        at_once = False  # sub-groups of whole tensors
        gradients = 0.0  # they lie in a buffer of the engine
    bucket = ZERO3_GROUP_ELEMENTS if stack.sharding == "zero3" else OUR_BUCKET_ELEMENTS
    moved_at_once = trained + copies * resident / 4 / state_shards
    if stack.sharding == "zero3" and not trainer.kernels:
        moved_at_once = min(moved_at_once, ZERO3_SUB_GROUP_ELEMENTS)
    updated = moved_at_once if at_once else min(trained, max(bucket, n.largest / state_shards))
    words = {
        "weights": _weights_words(n, stack, frozen_bytes, four, adapter, weight_shards),
        "master_weights": f"4 B x {n.trained:,} trained parameters / {state_shards}",
        "optimizer": f"{OPTIMIZER_STATES.get(stack.optimizer, 8.0) * trainer.state_bytes / 4:g} B of "
        f"{stack.optimizer} states x {n.trained:,} / {state_shards}",
        "gradients": f"{grad_bytes} B x {n.trained:,} / {grad_shards}",
    }
    return Held(
        int(weights), int(masters), int(states), int(gradients), int(host), int(nvme), int(paged),
        int(updated),
        words,
    )  # fmt: skip


def _paged(stack: Stack, trainer: Trainer) -> bool:
    return stack.optimizer.startswith("paged") or trainer.paged_states


def four_bit_bytes(stack: Stack, trainer: Trainer) -> tuple[float, float, float]:
    """Bytes per 4-bit element: in all, of the elements, and of their scales.

    Scales are not parameters, so no engine splits them over ranks.
    """
    if trainer.quantised_bytes:
        return trainer.quantised_bytes, trainer.quantised_bytes, 0.0
    four = NF4_DOUBLE_BYTES if stack.double_quantization else NF4_BYTES
    return four, 0.5, four - 0.5


def _weights_words(n: Counts, stack: Stack, frozen_bytes: int, four: float, adapter: int, shards: int) -> str:
    if stack.method == "full":
        return f"{adapter} B x {n.trained:,} parameters / {shards}"
    text = f"{frozen_bytes} B x {n.frozen_16bit:,} frozen"
    if n.frozen_4bit:
        text += f" + {four:.4f} B x {n.frozen_4bit:,} in 4 bits"
    return f"({text} + {adapter} B x {n.trained:,} of adapters) / {shards}"
