"""What a process takes on a card beside its tensors, and what the caching allocator holds beyond them."""

from shardwise.estimate.stack import Stack
from shardwise.units import MIB

# CUDA context with torch's kernels loaded, on A100 and H100 with CUDA 12 (nvidia-smi of an idle process after one
# matrix product; NVIDIA's driver takes about 0.3 GiB of it). Lazy module loading (CUDA 12.2+) makes it smaller.
CONTEXT_BYTES = 500 * MIB
# cuBLAS workspace of torch on Hopper (32 MiB) and older cards (8 MiB): torch/docs/source/notes/cuda.rst
WORKSPACE_BYTES = 32 * MIB
# NCCL's channel buffers per communicator (NCCL_BUFFSIZE 4 MiB x channels x peers of a ring, both directions).
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
