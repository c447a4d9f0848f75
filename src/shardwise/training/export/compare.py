"""Is what was written the model that was trained? Asked of the logits on rows of the run's own data."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Difference:
    """Over all positions of the compared rows. `relative`: root mean square of the difference over that of
    the logits; `kl`: mean Kullback-Leibler divergence of next-token distributions, in nats; `agreement`: share
    of positions with the same most likely token."""

    relative: float
    kl: float
    agreement: float
    positions: int

    def __str__(self) -> str:
        return (
            f"logits differ by {self.relative:.2e} (relative), KL {self.kl:.2e} nats, "
            f"same most likely token at {self.agreement:.1%} of {self.positions} positions"
        )


@torch.no_grad()
def logits(model: Any, rows: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """fp32 logits (T, V) of each row, one row at a time."""
    device = next(model.parameters()).device
    model.eval()
    return [
        model(input_ids=torch.tensor([list(row)], device=device), use_cache=False).logits[0].float().cpu()
        for row in rows
    ]


def difference(trained: Sequence[torch.Tensor], written: Sequence[torch.Tensor]) -> Difference:
    """How far the written model is from the trained one."""
    a_PV, b_PV = torch.cat(list(trained)), torch.cat(list(written))
    vocabulary = min(a_PV.shape[1], b_PV.shape[1])  # padded rows of an embedding differ between formats
    a_PV, b_PV = a_PV[:, :vocabulary], b_PV[:, :vocabulary]
    relative = float((a_PV - b_PV).square().mean().sqrt() / a_PV.square().mean().sqrt())
    p, q = a_PV.log_softmax(-1), b_PV.log_softmax(-1)
    kl = float((p.exp() * (p - q)).sum(-1).mean())
    agreement = float((a_PV.argmax(-1) == b_PV.argmax(-1)).float().mean())
    return Difference(relative, max(0.0, kl), agreement, a_PV.shape[0])
