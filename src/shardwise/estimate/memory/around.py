"""What an engine adds around the layers of a step: gathered weights, buckets, gradients on their way."""

from dataclasses import dataclass

from shardwise.estimate.memory.reduction import Bucket
from shardwise.estimate.memory.shards import Shards, shards_of
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
    head: the gathered head alone, while it runs, where it is a unit of its own.
    root: gathered embedding and head, all through forward and backward; root_reduced and root_shard: their gradients.
    reducing: alive for a moment whenever gradients are reduced. bucket: a buffer of the backward pass.
    constant: buffers that live all the time. live: weights that ZeRO-3 has gathered in forward and backward; its
    prefetcher runs ahead until they are max_live_parameters. hooked: it gathers them in hooks of their layers.
    """

    gathered: int = 0
    kept: bool = False
    reduced: int = 0
    shard: int | None = None
    root: int = 0
    head: int = 0
    root_shard: int = 0
    root_reduced: int = 0
    reducing: int = 0
    bucket: int = 0
    constant: int = 0
    buckets: Bucket | None = None  # of DeepSpeed
    live: int = 0
    hooked: bool = False


NOTHING = Around()


def around(shape: ModelShape, stack: Stack, trainer: Trainer) -> Around:
    """What the engine of `stack` adds around layers."""
    c = 2 if stack.precision == "bf16" else 4
    n, n_ranks = stack.dp_shard, stack.world_size
    match stack.sharding:
        case "ddp":
            whole = shards_of(shape, stack, trainer, 1)
            bucket = min(DDP_BUCKET_BYTES, c * whole.trained) if c == 2 and n_ranks > 1 else 0
            copies = whole.trained * (trainer.weight_bytes or c) if trainer.gradient_buckets else 0
            return Around(constant=copies, reducing=2 * bucket)
        case "fsdp2":
            return _fsdp2(shape, stack, trainer, c) if n > 1 else NOTHING
        case "zero3":
            if trainer.kernels:
                return _zero3(
                    shape, stack, shards_of(shape, stack, trainer, 1), shards_of(shape, stack, trainer, n), c
                )
            # Flat buffers: the reduction bucket in fp32 and the gradient shards.
            whole = shards_of(shape, stack, trainer, 1)
            moved = n > 1 or stack.offload_parameters != "none"  # else the one part is the whole
            live = _gathered_elements(shape, stack, whole) if moved else 0
            bucket = min(stack.reduce_bucket_size, whole.trained)
            flat = 4 * bucket + c * whole.trained // n
            return Around(constant=flat, live=c * live, shard=0, hooked=True)
        case "zero1" | "zero2":
            whole = shards_of(shape, stack, trainer, 1)
            if trainer.kernels:
                return _zero(shape, stack, whole, c)
            # Gradients go through a bucket (two when communication overlaps) into this rank's part.
            bucket = min(stack.reduce_bucket_size, whole.trained) * (2 if n > 1 else 1)
            if trainer.whole_buckets:
                bucket = 2 * stack.reduce_bucket_size
            return Around(
                bucket=c * bucket,
                shard=c * whole.layer_trained // n,
                root_shard=c * whole.root_trained // n,
            )
    return NOTHING


def _zero(shape: ModelShape, stack: Stack, whole: Shards, c: int) -> Around:
    """DeepSpeed's ZeRO-1 and 2 as our engine sets them up.

    ZeRO-1 with several micro-batches sums whole gradients in fp32 and keeps those of the weights' dtype (`held`).
    """
    accumulates = stack.gradient_accumulation_steps > 1
    if stack.sharding == "zero1" and accumulates:
        return NOTHING
    part = -(-whole.trained // stack.dp_shard)
    offloads = stack.offload_optimizer != "none"
    largest = max(t.size for t in shape.tensors) if stack.method == "full" else 0
    covered = _covering(shape, stack, part)
    return Around(
        constant=c * largest if offloads else 0,  # gradients on their way to the host, a tensor at a time
        buckets=Bucket(
            elements=min(stack.reduce_bucket_size, whole.trained),
            width=c,
            # Parts of several ranks are put in a row first; a sum in another dtype is a copy.
            reducing=(c if stack.dp_shard > 1 else 0) + (4 if c < 4 else 0),
            # With several micro-batches this rank's sums live all the time (`held`).
            part=0 if accumulates or offloads else c * covered,
            part_elements=covered,
            trained=whole.trained,
            slice=part,
        ),
    )


def _zero3(shape: ModelShape, stack: Stack, whole: Shards, mine: Shards, c: int) -> Around:
    """ZeRO-3 as our engine sets it up (deepspeed/runtime/zero/stage3.py, partitioned_param_coordinator.py, 0.19.8).

    Flat buffers live all the time: the reduction bucket in fp32 and this rank's gradients.
    """
    accumulates = stack.gradient_accumulation_steps > 1
    bucket = min(stack.reduce_bucket_size, whole.trained)
    sums = 4 if accumulates or c == 4 else 2
    gradients = sums * mine.trained if stack.offload_optimizer == "none" else 0
    small = sum(t.parameters for t in shape.tensors if t.size <= stack.param_persistence_threshold)
    live = _gathered_elements(shape, stack, whole)
    return Around(
        constant=4 * bucket + gradients + c * small,
        buckets=Bucket(bucket, c, sums if sums < 4 else 0, 0, 0, whole.trained, count=0),
        live=c * live if stack.dp_shard > 1 or stack.offload_parameters != "none" else 0,
        hooked=True,
    )


def _gathered_elements(shape: ModelShape, stack: Stack, whole: Shards) -> int:
    """Elements ZeRO-3 has gathered at most: what its prefetcher may keep, and the module at hand however large."""
    layer = whole.layer_trained + whole.layer_frozen
    head = shape.vocab_size * shape.hidden_size
    running = min(layer, _largest(shape) + min(layer, stack.prefetch_bucket_size))
    live = max(min(stack.max_live_parameters, shape.total_parameters), head + running)
    if stack.method != "full":
        # Frozen layers are fetched beyond the limit in the backward, whose buffers hold several weights and live as
        # long as the last of them: 0.3 to 1 GiB in traces of 7B to 70B models (benchmarks/composition.py).
        live = min(shape.total_parameters, live + min(2 * layer, stack.max_live_parameters // 2))
    return live


def _largest(shape: ModelShape) -> int:
    return max((t.size for t in shape.tensors if t.per_layer and t.part == "text"), default=0)


def _covering(shape: ModelShape, stack: Stack, part: int) -> int:
    """Elements of all tensors that begin in rank 0's part: whole tensors are kept, also the one that ends beyond."""
    if stack.method != "full":
        return part
    covered = 0
    tensors = [t for t in shape.tensors if t.kind == "embedding"]
    layer = [t for t in shape.tensors if t.per_layer and t.part == "text" and t.kind not in ("norm", "bias")]
    for t in tensors:
        covered += t.parameters
    per_layer = sum(t.parameters for t in layer) // shape.num_hidden_layers
    if covered < part and per_layer:
        covered += (part - covered) // per_layer * per_layer
    for t in layer:
        if covered >= part:
            break
        covered += t.parameters // shape.num_hidden_layers
    return max(covered, part)


def _fsdp2(shape: ModelShape, stack: Stack, trainer: Trainer, c: int) -> Around:
    """FSDP2: every rank's part of a gather is as large as the largest, so that n of them are gathered."""
    n = stack.dp_shard
    mine = shards_of(shape, stack, trainer, n)
    _, packed, scales = four_bit_bytes(stack, trainer)
    four = packed + (scales if trainer.sharded_scales else 0)
    reduced = trainer.weight_bytes or c if not trainer.masters else 4
    # Nothing is in fp32 without masters (formula.ours).
    stored = c if trainer.kernels and trainer.state_bytes == c else reduced
    stays = stored if stack.offload_parameters == "none" else 0
    with_gradient = mine.layer_trained + (mine.layer_frozen if trainer.flat_gradients == "whole" else 0)
    root = n * c * (mine.root_trained + mine.root_frozen)
    return Around(
        gathered=n * (c * (mine.layer_trained + mine.layer_frozen) + int(four * mine.layer_four)),
        kept=not stack.reshard_after_forward,
        reduced=n * reduced * with_gradient,
        shard=stays * with_gradient,
        root=0 if trainer.root_units else root,
        head=root // (1 if shape.tie_word_embeddings else 2) if trainer.root_units else 0,
        root_shard=stays * mine.root_trained,
        root_reduced=n
        * reduced
        * mine.root_trained
        // (2 if trainer.root_units and not shape.tie_word_embeddings else 1),
    )
