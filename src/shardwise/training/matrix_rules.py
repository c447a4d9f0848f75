"""Update rules that look at a matrix as a whole, over matrices that may be split: Muon and Adafactor.

torch's Muon iterates in bf16 only and neither of torch's two works on shards (Adafactor's in-place norms are not
allowed on sharded DTensors in torch 2.13, Muon would gather every matrix on every rank).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from shardwise.training.shards import Shape, Shards

# Keller Jordan's quintic, five steps: https://kellerjordan.github.io/posts/muon/
_A, _B, _C = 3.4445, -4.7750, 2.0315
_STEPS = 5


def orthogonalised(matrix: torch.Tensor) -> torch.Tensor:
    """Singular values of a matrix (rows, columns) brought near 1 by Newton-Schulz, in the matrix's own dtype."""
    x = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(_STEPS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=_B, alpha=_C), x, beta=_A)
    return x.T if matrix.shape[0] > matrix.shape[1] else x


def muon_update(matrix: torch.Tensor) -> torch.Tensor:
    """Orthogonalised and scaled to the size of AdamW's updates: 0.2 * sqrt(max(rows, columns)), arXiv:2502.16982."""
    return orthogonalised(matrix) * (0.2 * max(matrix.shape) ** 0.5)


class Muon(torch.optim.Optimizer):
    """Momentum whose update is orthogonalised; decoupled weight decay. `named` are matrices, or rows of them.

    `iterate_in`: dtype of the Newton-Schulz iteration and of what goes over the links; bf16 for bf16 training (as
    torch.optim.Muon always does), fp32 for fp32: in bf16 a rounding difference of 1e-7 in a gradient becomes 1e-3
    in the update. State: momentum_buffer, fp32, split like the matrix.
    """

    def __init__(
        self,
        named: Sequence[tuple[str, torch.Tensor]],
        lr: float,
        weight_decay: float,
        momentum: float,
        iterate_in: torch.dtype,
        shards: Shards | None = None,
    ) -> None:
        self.iterate_in, self.shards = iterate_in, shards
        self.shapes = _shapes(named, shards)
        super().__init__(
            [p for _, p in named], {"lr": lr, "weight_decay": weight_decay, "momentum": momentum}
        )

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            updates = []
            for param in params:
                assert param.grad is not None
                state = self.state[param]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(param.grad)
                state["momentum_buffer"].lerp_(param.grad, 1 - group["momentum"])
                nesterov = param.grad.lerp(state["momentum_buffer"], group["momentum"])
                updates.append(nesterov.to(self.iterate_in))
            if self.shards is None:
                changed = [muon_update(u) for u in updates]
            else:
                changed = self.shards.on_whole(updates, [self.shapes[p] for p in params], muon_update)
            for param, update in zip(params, changed, strict=True):
                param.mul_(1 - group["lr"] * group["weight_decay"])
                param.add_(update.to(param.dtype), alpha=-group["lr"])


class ShardedAdafactor(torch.optim.Optimizer):
    """torch.optim.Adafactor (arXiv:1804.04235, with its defaults) over rows of matrices.

    What Adafactor averages over all rows is summed over the shards: two reductions per call, whatever the number of
    tensors. States are torch's: step, row_var (split like the rows), col_var (the same on every rank), variance.
    """

    BETA2_DECAY, EPS2, CLIP = -0.8, 1e-3, 1.0

    def __init__(
        self,
        groups: list[dict[str, Any]],
        named: Sequence[tuple[str, torch.Tensor]],
        lr: float,
        shards: Shards,
    ) -> None:
        self.shards, self.shapes = shards, _shapes(named, shards)
        super().__init__(groups, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        chosen = [(p, g) for g in self.param_groups for p in g["params"] if p.grad is not None]
        if not chosen:
            return
        params = [p for p, _ in chosen]
        sums = self._summed([self._local_sums(p) for p in params])
        alphas, updates = [], []
        for (param, group), (squares, *rest) in zip(chosen, sums, strict=True):
            state, count = self.state[param], _elements(self.shapes[param])
            rate = min(group["lr"], 1 / float(state["step"]) ** 0.5)
            alphas.append(rate * torch.clamp((squares / count).sqrt(), min=self.EPS2))
            param.mul_(1 - group["lr"] * group["weight_decay"])
            updates.append(self._update(param, *rest))
        norms = self._summed([[u.square().sum().reshape(1)] for u in updates])
        for param, update, alpha, (squares,) in zip(params, updates, alphas, norms, strict=True):
            rms = (squares / _elements(self.shapes[param])).sqrt()
            param.add_(update * -(alpha / torch.clamp(rms / self.CLIP, min=1.0)))

    def _local_sums(self, param: torch.Tensor) -> list[torch.Tensor]:
        """This rank's share of: squares of the weights; and of a matrix: squares per column, sum of row_var."""
        grad, state = param.grad, self.state[param]
        assert grad is not None
        if not state:
            state["step"] = torch.tensor(0.0)
            if grad.dim() > 1:
                state["row_var"] = grad.new_zeros((*grad.shape[:-1], 1))
                state["col_var"] = grad.new_zeros((*grad.shape[:-2], 1, grad.shape[-1]))
            else:
                state["variance"] = torch.zeros_like(grad)
        state["step"] += 1
        found = [param.float().square().sum().reshape(1)]
        if grad.dim() > 1:
            state["row_var"].lerp_(grad.square().mean(dim=-1, keepdim=True), self._share_of_new(state))
        if grad.dim() == 2:  # of more dimensions, the split one is not averaged over
            found += [grad.square().sum(dim=0), state["row_var"].sum().reshape(1)]
        return found

    def _update(
        self, param: torch.Tensor, columns: torch.Tensor | None = None, rows: torch.Tensor | None = None
    ) -> torch.Tensor:
        grad, state = param.grad, self.state[param]
        assert grad is not None
        eps1, new = torch.finfo(param.dtype).eps, self._share_of_new(state)
        if grad.dim() > 1:
            row_var, col_var = state["row_var"], state["col_var"]
            if columns is not None and rows is not None:
                whole = self.shapes[param][0]
                col_var.lerp_((columns / whole).reshape(col_var.shape), new)
                mean = rows / whole
            else:
                col_var.lerp_(grad.square().mean(dim=-2, keepdim=True), new)
                mean = row_var.mean(dim=-2, keepdim=True)
            estimate = (row_var @ col_var) / mean.clamp(min=eps1)
        else:
            state["variance"].lerp_(grad.square(), new)
            estimate = state["variance"]
        return estimate.clamp(min=eps1 * eps1).rsqrt_().mul_(grad)

    def _share_of_new(self, state: Mapping[str, Any]) -> float:
        return float(float(state["step"]) ** self.BETA2_DECAY)

    def _summed(self, parts: list[list[torch.Tensor]]) -> list[list[torch.Tensor]]:
        """All of them over all shards, in one reduction."""
        flat = self.shards.sum(torch.cat([t.float() for part in parts for t in part]))
        pieces = iter(flat.split([t.numel() for part in parts for t in part]))
        return [[next(pieces) for _ in part] for part in parts]


def _shapes(named: Sequence[tuple[str, torch.Tensor]], shards: Shards | None) -> dict[torch.Tensor, Shape]:
    return {p: tuple(p.shape) if shards is None else shards.shapes[name] for name, p in named}


def _elements(shape: Shape) -> int:
    return int(torch.Size(shape).numel())
