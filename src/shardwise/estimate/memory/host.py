"""Host memory and disk of one node: loading, offloaded states, pinned buffers, processes."""

from shardwise.estimate.memory.states import counts_of
from shardwise.estimate.stack import Stack
from shardwise.facts.model import ModelShape
from shardwise.units import GIB

# Resident memory of a Python process with torch, transformers and (on GPUs) CUDA's host side.
PROCESS_BYTES = int(1.5 * GIB)
STORED_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "fp8": 1}


def weights_on_disk_bytes(shape: ModelShape) -> int:
    return STORED_BYTES.get(shape.dtype, 2) * shape.total_parameters


def loading_bytes_per_node(shape: ModelShape, stack: Stack, every_rank: bool = False) -> int:
    """Host bytes of weights while loading. `every_rank`: each of a node's ranks reads the whole model (as common
    trainers do); else one copy per node, the others wait or hold meta tensors."""
    width = 2 if stack.precision == "bf16" else 4
    return width * shape.total_parameters * (stack.gpus_per_node if every_rank else 1)


def pinned_bytes(size: int) -> int:
    """Pinned host memory comes in powers of two (torch's CachingHostAllocator)."""
    return 1 << (size - 1).bit_length() if size > 0 else 0


def host_bytes_per_node(shape: ModelShape, stack: Stack, offloaded_per_rank: int) -> int:
    """Peak host memory of a node: the processes, and the larger of loading and offloaded states."""
    ranks = min(stack.gpus_per_node, stack.world_size)
    loading = loading_bytes_per_node(shape, stack, every_rank=stack.sharding in ("ddp", "zero1", "zero2"))
    if stack.device == "cpu":
        loading = 0  # the weights are the device's own
    offloaded = offloaded_per_rank * ranks
    return PROCESS_BYTES * ranks + max(loading, offloaded)


def disk_bytes_per_node(shape: ModelShape, stack: Stack, nvme_per_rank: int) -> int:
    """Model files, one checkpoint being written beside one that is kept, and states on NVMe.

    Where states are split over the ranks, each node writes its own part of a checkpoint.
    """
    trained = counts_of(shape, stack).trained
    nodes = 1 if stack.sharding in ("single", "ddp") else max(1, stack.world_size // stack.gpus_per_node)
    checkpoint = 12 * trained // nodes + 4 * trained  # fp32 weights and two Adam states; exported weights
    return (
        weights_on_disk_bytes(shape)
        + 2 * checkpoint
        + nvme_per_rank * min(stack.gpus_per_node, stack.world_size)
    )
