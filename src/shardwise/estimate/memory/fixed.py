"""What a process takes on a card beside its tensors, and what the caching allocator holds beyond them."""

from shardwise.estimate.stack import Stack
from shardwise.units import MIB

# CUDA context with the kernels a step loads (lazy loading, CUDA 11.7 and later): 400 MB reported for torch in 2023
# (pytorch issue 109888), 484 MiB with NCCL's library on an RTX 3090 (nccl pull request 2366).
CONTEXT_BYTES = 500 * MIB
# cuBLAS workspace of torch on Hopper (32 MiB) and older cards (8 MiB): torch/docs/source/notes/cuda.rst
WORKSPACE_BYTES = 32 * MIB
# NCCL's channel buffers, linear in the channels its links need and flat beyond two nodes (nccl issue 986). With the
# context it makes 0.98 GB, against 1.06 GB seen on 8 H100 after ring collectives (nccl issue 1685); all-to-all, which
# none of the engines uses, takes 3 GB more there.
NCCL_BYTES = 400 * MIB
# With expandable segments a run needs its tensors and 0.2 %.
EXPANDABLE_OVERHEAD = 0.002
PAGE_BYTES = 20 * MIB


def fixed_bytes(stack: Stack) -> int:
    """Context, library workspaces and communication buffers of one process."""
    if stack.device != "cuda":
        return 0
    return CONTEXT_BYTES + WORKSPACE_BYTES + (NCCL_BYTES if stack.world_size > 1 else 0)


def reserved_bytes(allocated: int, stack: Stack) -> int:
    """Segments the caching allocator maps, with expandable segments (what our launcher sets)."""
    if stack.device != "cuda":
        return allocated
    return -(-int(allocated * (1 + EXPANDABLE_OVERHEAD)) // PAGE_BYTES) * PAGE_BYTES
