"""What a memory estimate is made of. The meter of a real run uses the same term names."""

from dataclasses import dataclass

# Order of printing. `engine` is what the engine adds: buckets, gathered parameters, reduction buffers.
TERMS = (
    "weights",
    "master_weights",
    "gradients",
    "optimizer",
    "activations",
    "loss",
    "engine",
    "temporaries",
    "inputs",
)
PHASES = ("load", "forward", "loss", "backward", "step", "evaluation", "save")


@dataclass(frozen=True, slots=True)
class MemoryTerm:
    """One line of a breakdown: bytes live at the peak, the formula in words, and the numbers put in."""

    name: str
    bytes: int
    formula: str = ""


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Estimated memory of the fullest rank.

    `allocated_bytes` is the peak of live tensors and decides whether a plan fits. `reserved_bytes` adds the
    allocator's holes, `fixed_bytes` is what a process takes beside its tensors (context, NCCL, workspaces).
    `low_bytes` and `high_bytes` bound the allocated peak. `source` is "tape" or "formula". `paged_bytes`, in none of
    these, are optimizer states in managed memory: on the device while there is room, in host memory (where
    `host_bytes_per_node` counts them) otherwise.
    """

    allocated_bytes: int
    peak_phase: str
    phases: dict[str, int]
    terms: tuple[MemoryTerm, ...]
    reserved_bytes: int
    fixed_bytes: int
    host_bytes_per_node: int
    disk_bytes_per_node: int
    low_bytes: int
    high_bytes: int
    source: str
    notes: tuple[str, ...] = ()
    paged_bytes: int = 0

    @property
    def needed_bytes(self) -> int:
        """What one device must hold: live tensors and what the process takes beside them."""
        return self.allocated_bytes + self.fixed_bytes

    @property
    def most_needed_bytes(self) -> int:
        """The same at the upper bound of the estimate: a plan fits where this is there."""
        return self.high_bytes + self.fixed_bytes

    @property
    def device_bytes(self) -> int:
        """What the vendor's tool (nvidia-smi) will show where there is room for paged states."""
        return self.reserved_bytes + self.fixed_bytes + self.paged_bytes

    def term(self, name: str) -> int:
        return sum(t.bytes for t in self.terms if t.name == name)
