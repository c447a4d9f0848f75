"""Parameters whose rows are split over ranks, as an update rule sees them: sums over all rows, and whole matrices."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Shards:
    """Rows as `torch.chunk` deals them over the ranks of `group`, which is how FSDP2 shards dimension 0.

    `shapes`: whole shape by parameter name. `device`: where collectives run, also for shards in host memory.
    """

    group: dist.ProcessGroup
    device: torch.device
    shapes: Mapping[str, Shape]

    @property
    def count(self) -> int:
        return self.group.size()

    def rows(self, shape: Shape, rank: int) -> int:
        """Rows of a tensor of whole `shape` that lie on `rank` of the group."""
        most = -(-shape[0] // self.count)
        return max(0, min(most, shape[0] - most * rank))

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over all shards. Collective; the result lies where `tensor` did."""
        total = tensor.to(self.device)
        dist.all_reduce(total, group=self.group)
        return total.to(tensor.device)

    def on_whole(
        self,
        shards: Sequence[torch.Tensor],
        shapes: Sequence[Shape],
        change: Callable[[torch.Tensor], torch.Tensor],
    ) -> list[torch.Tensor]:
        """This rank's rows of `change(matrix)` for every matrix. Collective; all shards of one dtype.

        Matrices are dealt out: each is put together on one rank, changed there once, and its rows go back. So at
        a time a rank holds one whole matrix (and its own rows of as many as there are ranks), and no work is done
        twice. Two all-to-alls of one matrix's size per `count` matrices.
        """
        changed: list[torch.Tensor] = []
        for start in range(0, len(shards), self.count):
            part = [s.to(self.device).contiguous() for s in shards[start : start + self.count]]
            changed += self._exchange(part, list(shapes[start : start + self.count]), change)
        return [c.to(s.device) for c, s in zip(changed, shards, strict=True)]

    def _exchange(
        self,
        part: list[torch.Tensor],
        shapes: list[Shape],
        change: Callable[[torch.Tensor], torch.Tensor],
    ) -> list[torch.Tensor]:
        rank = self.group.rank()
        sent = [p.numel() for p in part] + [0] * (self.count - len(part))
        mine = shapes[rank] if rank < len(part) else (0, 0)
        received = [self.rows(mine, other) * mine[1] for other in range(self.count)]
        flat = torch.cat([p.flatten() for p in part])
        whole = flat.new_empty(sum(received))
        dist.all_to_all_single(whole, flat, received, sent, group=self.group)
        if rank < len(part):
            whole = change(whole.view(mine)).to(whole.dtype).contiguous().flatten()
        dist.all_to_all_single(flat, whole, sent, received, group=self.group)
        pieces = flat.split(sent[: len(part)])
        return [piece.view(p.shape) for piece, p in zip(pieces, part, strict=True)]
