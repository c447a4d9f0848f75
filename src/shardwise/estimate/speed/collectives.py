"""Seconds of collectives on a ring over nodes, and of traffic between device, host and disk.

A ring all-gather of B bytes over n ranks moves B (n-1)/n through every link in turn; between nodes all network
cards of a node carry a share (NCCL's channels), so the slower of the two levels decides
(Thakur, Rabenseifner, Gropp 2005; NCCL performance notes, "bus bandwidth"). A reduce-scatter costs the same, an
all-reduce both.
"""

from dataclasses import dataclass

from shardwise.estimate.speed import constants as c
from shardwise.facts.gpus import Gpu


@dataclass(frozen=True, slots=True)
class Group:
    """Ranks that talk: how many, how many of them stand in one node, over which links."""

    ranks: int
    per_node: int
    inside_bytes_per_second: float
    between_bytes_per_second: float  # per node, all its cards together

    @property
    def nodes(self) -> int:
        return max(1, self.ranks // self.per_node)

    def gather_seconds(self, size_bytes: float) -> float:
        """All-gather or reduce-scatter of `size_bytes` in total."""
        if self.ranks <= 1 or size_bytes <= 0:
            return 0.0
        n, nodes = self.per_node, self.nodes
        inside = size_bytes * (n - 1) / n / self.inside_bytes_per_second if n > 1 else 0.0
        between = size_bytes * (nodes - 1) / nodes / self.between_bytes_per_second if nodes > 1 else 0.0
        return max(inside, between) + c.COLLECTIVE_SECONDS + c.HOP_SECONDS * (self.ranks - 1)

    def reduce_seconds(self, size_bytes: float) -> float:
        """All-reduce of `size_bytes`."""
        return 2 * self.gather_seconds(size_bytes)


def link_share(gpu: Gpu) -> float:
    """What of a link's rate collectives reach."""
    if gpu.link.name.startswith(("nvlink", "xgmi", "c2c")):
        return c.NVLINK
    return c.NO_PEER if gpu.form == "desktop" else c.PCIE


def group(gpu: Gpu, ranks: int, gpus_per_node: int, stride: int = 1) -> Group:
    """The group of `ranks` ranks, `stride` apart (stride > 1: replicas of a sharded group)."""
    per_node = max(1, min(ranks, gpus_per_node // stride)) if stride < gpus_per_node else 1
    cards = 1 if gpu.network.shared else min(gpus_per_node, ranks * stride)
    between = gpu.network.bytes_per_second * cards * c.NETWORK / max(1, min(stride, gpus_per_node))
    return Group(ranks, per_node, gpu.link.bytes_per_second * link_share(gpu), between)
