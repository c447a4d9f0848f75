"""How many elements of a model the fullest rank holds when tensors are split, padding included.

FSDP2 splits every tensor along its first axis into n parts of ceil(rows / n) rows (torch.chunk), so that rank 0 holds
the most; ZeRO-3 splits every flattened tensor into parts of ceil(elements / n). Both matter where rows are few or
ranks are many: an adapter of rank 16 on 512 ranks has one row on each of 16 ranks and none on the others.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from shardwise.estimate.memory.trainer import Trainer
from shardwise.estimate.stack import Stack
from shardwise.facts.model import ModelShape


@dataclass(frozen=True, slots=True)
class Shards:
    """Elements on the fullest rank: of all layers together, of one layer, and of the rest of the model (`root`).

    `four`: elements that are stored in 4 bits.
    """

    trained: int
    frozen: int
    four: int
    layer_trained: int
    layer_frozen: int
    layer_four: int
    root_trained: int
    root_frozen: int


def part(shape: tuple[int, ...], ranks: int, rows: bool) -> int:
    """Elements of the largest part of a tensor, split by `rows` or flattened."""
    if rows:
        return -(-shape[0] // ranks) * prod(shape[1:])
    return -(-prod(shape) // ranks)


def shards_of(shape: ModelShape, stack: Stack, trainer: Trainer, ranks: int) -> Shards:
    """What `trainer` holds of `shape` on the fullest of `ranks`, split as the engine of `stack` splits."""
    return _shards(
        shape, stack.method, stack.lora_rank, stack.lora_targets, stack.dora, trainer.quantised_experts, ranks,
        stack.sharding == "fsdp2",
    )  # fmt: skip


@lru_cache(maxsize=4096)
def _shards(
    shape: ModelShape,
    method: str,
    rank: int,
    targets: str | tuple[str, ...],
    dora: bool,
    experts: bool,
    ranks: int,
    rows: bool,
) -> Shards:
    """`experts`: expert matrices are stored in 4 bits too."""
    sums = {name: [0, 0] for name in ("trained", "frozen", "four")}  # all, of layers
    for kind, size, count, per_layer in _tensors(shape, method, rank, targets, dora, experts, ranks, rows):
        sums[kind][0] += size * count
        if per_layer:
            sums[kind][1] += size * count
    layers = shape.num_hidden_layers
    (trained, in_layers), (frozen, frozen_in_layers), (four, four_in_layers) = sums.values()
    return Shards(
        trained, frozen, four,
        in_layers // layers, frozen_in_layers // layers, four_in_layers // layers,
        trained - in_layers, frozen - frozen_in_layers,
    )  # fmt: skip


def _tensors(
    shape: ModelShape,
    method: str,
    rank: int,
    targets: str | tuple[str, ...],
    dora: bool,
    experts: bool,
    ranks: int,
    rows: bool,
) -> Iterator[tuple[str, int, int, bool]]:
    """(trained | frozen | four, elements of the largest part, how many such tensors, in a layer)."""
    quantised = ("linear", "expert") if experts else ("linear",)
    for t in shape.tensors:
        per_layer = t.per_layer and t.part == "text"
        if method == "full":
            yield "trained", part(t.shape, ranks, rows), t.count, per_layer
        elif method == "qlora" and t.kind in quantised:  # two elements to a byte, bytes in one column
            yield "four", 2 * -(-t.size // 2 // ranks), t.count, per_layer
        else:
            yield "frozen", part(t.shape, ranks, rows), t.count, per_layer
    if method != "full":
        for t in shape.adapted(targets):
            out, into = t.shape[0], t.shape[1]
            yield "trained", part((rank, into), ranks, rows), t.count, t.per_layer
            yield "trained", part((out, rank), ranks, rows), t.count, t.per_layer
            if dora:
                yield "trained", part((out,), ranks, rows), t.count, t.per_layer
