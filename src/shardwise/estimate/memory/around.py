"""What an engine adds around the layers of a step: gathered weights, buckets, gradients on their way."""

from dataclasses import dataclass

from shardwise.estimate.memory.shards import Shards, shards
from shardwise.estimate.memory.states import four_bit_bytes
from shardwise.estimate.memory.trainer import Trainer
from shardwise.estimate.stack import Stack
from shardwise.facts.model import ModelShape

DDP_BUCKET_BYTES = 25 * 2**20  # gradients reduced at a time (engines/ddp.py)


@dataclass(frozen=True, slots=True)
class Around:
    """Bytes an engine adds around layers; 0 where it does nothing.

    gathered: one layer's weights, whole; while a layer runs, the buffer that its own (in the forward) or the next
    one's (in the backward) were gathered into is as large again. kept: gathered layers stay until their backward.
    reduced: a layer's gradients in the buffer they are reduced from, until the next layer's are.
    shard: a layer's reduced gradients that stay; None: gradients stay as they are.
    root: gathered embedding and head, all through forward and backward; root_reduced and root_shard: their gradients.
    live: gathered weights that stay through forward and backward, not through the update.
    reducing: alive for a moment whenever gradients are reduced. bucket: a buffer of the backward pass.
    constant: buffers that live all the time.
    """

    gathered: int = 0
    kept: bool = False
    reduced: int = 0
    shard: int | None = None
    root: int = 0
    root_shard: int = 0
    root_reduced: int = 0
    live: int = 0
    reducing: int = 0
    bucket: int = 0
    constant: int = 0


NOTHING = Around()


def around(shape: ModelShape, stack: Stack, trainer: Trainer) -> Around:
    """What the engine of `stack` adds around layers."""
    c = 2 if stack.precision == "bf16" else 4
    n, n_ranks = stack.dp_shard, stack.world_size
    match stack.sharding:
        case "ddp":
            whole = _split(shape, stack, trainer, 1)
            bucket = min(DDP_BUCKET_BYTES, c * whole.trained) if c == 2 and n_ranks > 1 else 0
            copies = whole.trained * (trainer.weight_bytes or c) if trainer.gradient_buckets else 0
            return Around(constant=copies, reducing=2 * bucket)
        case "fsdp2":
            return _fsdp2(shape, stack, trainer, c) if n > 1 else NOTHING
        case "zero3":
            # Flat buffers: the reduction bucket in fp32 and the gradient shards; and gathered weights, which stay
            # while they are within max_live_parameters; the module at hand is whole however large it is.
            whole = _split(shape, stack, trainer, 1)
            largest = max(t.size for t in shape.tensors)
            live = max(largest, min(stack.max_live_parameters, shape.total_parameters)) if n > 1 else 0
            bucket = min(stack.reduce_bucket_size, whole.trained)
            flat = 4 * bucket + c * whole.trained // n
            return Around(constant=flat, live=c * live, shard=0)
        case "zero1" | "zero2":
            # Gradients go through a bucket (two when communication overlaps) into this rank's part.
            whole = _split(shape, stack, trainer, 1)
            bucket = min(stack.reduce_bucket_size, whole.trained) * (2 if n > 1 else 1)
            if trainer.whole_buckets:
                bucket = 2 * stack.reduce_bucket_size
            return Around(
                bucket=c * bucket,
                shard=c * whole.layer_trained // n,
                root_shard=c * whole.root_trained // n,
            )
    return NOTHING


def _fsdp2(shape: ModelShape, stack: Stack, trainer: Trainer, c: int) -> Around:
    """FSDP2: every rank's part of a gather is as large as the largest, so that n of them are gathered."""
    n = stack.dp_shard
    mine = _split(shape, stack, trainer, n)
    _, packed, _ = four_bit_bytes(stack, trainer)
    reduced = trainer.weight_bytes or c if not trainer.masters else 4
    stays = reduced if stack.offload_parameters == "none" else 0
    return Around(
        gathered=n * (c * (mine.layer_trained + mine.layer_frozen) + int(packed * mine.layer_four)),
        kept=not stack.reshard_after_forward,
        reduced=n * reduced * mine.layer_trained,
        shard=stays * mine.layer_trained,
        root=n * c * (mine.root_trained + mine.root_frozen),
        root_shard=stays * mine.root_trained,
        root_reduced=n * reduced * mine.root_trained,
    )


def _split(shape: ModelShape, stack: Stack, trainer: Trainer, ranks: int) -> Shards:
    return shards(
        shape, stack.method, stack.lora_rank, stack.lora_targets, stack.dora, trainer.quantised_experts, ranks,
        stack.sharding == "fsdp2",
    )  # fmt: skip
