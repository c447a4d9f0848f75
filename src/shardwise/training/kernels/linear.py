"""Linear layers with a low-rank adapter, and the gated MLP's last product, each as one autograd function.

x (T, in), weight W (out, in), adapter A (R, in) and B (out, R), scale s:
    y = x W' + bias + s (x A') B'
    dx = g W + s (g B) A,  dA = s (g B)' x,  dB = s g' (x A')
"""

from typing import Any

import torch
import torch.nn.functional as F

Grads = tuple[torch.Tensor | None, ...]


def _flat(t: torch.Tensor) -> torch.Tensor:
    return t.reshape(-1, t.shape[-1])


def _low_rank(x: torch.Tensor, y: torch.Tensor, A: torch.Tensor, B: torch.Tensor, s: float) -> torch.Tensor:
    """Add s (x A') B' to y in place; returns x A'."""
    down = x @ A.T
    y.addmm_(down, B.T, alpha=s)
    return down


class _AdaptedLinear(torch.autograd.Function):
    """Saves x (in elements per token, shared with whoever saves the same x) and x A' (R per token)."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        A: torch.Tensor,
        B: torch.Tensor,
        s: float,
    ) -> torch.Tensor:
        y = F.linear(x, weight, bias)
        down = _low_rank(_flat(x), _flat(y), A, B, s)
        ctx.save_for_backward(x, down, weight, A, B)
        ctx.scale = s
        return y

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Grads:
        x, down, weight, A, B = ctx.saved_tensors
        grad = _flat(grads[0])
        low = (grad @ B).mul_(ctx.scale)
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = (grad @ weight).addmm_(low, A).view(x.shape)
        return grad_x, None, None, low.T @ _flat(x), (grad.T @ down).mul_(ctx.scale), None


class _AddAdapter(torch.autograd.Function):
    """base + s (x A') B', written into `base`. Saves x and x A'; for base layers with kernels of their own."""

    @staticmethod
    def forward(
        ctx: Any, base: torch.Tensor, x: torch.Tensor, A: torch.Tensor, B: torch.Tensor, s: float
    ) -> torch.Tensor:
        down = _low_rank(_flat(x), base.view(-1, base.shape[-1]), A, B, s)
        ctx.mark_dirty(base)
        ctx.save_for_backward(x, down, A, B)
        ctx.scale = s
        return base

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Grads:
        x, down, A, B = ctx.saved_tensors
        grad = _flat(grads[0])
        low = (grad @ B).mul_(ctx.scale)
        grad_x = (low @ A).view(x.shape) if ctx.needs_input_grad[1] else None
        return grads[0], grad_x, low.T @ _flat(x), (grad.T @ down).mul_(ctx.scale), None


class _GatedProduct(torch.autograd.Function):
    """silu(gate) * up. Saves gate and up; transformers' own keeps silu(gate) too."""

    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Grads:
        gate, up = ctx.saved_tensors
        grad_up = F.silu(gate).mul_(grads[0])
        return torch.ops.aten.silu_backward(grads[0] * up, gate), grad_up


class _GatedLinear(torch.autograd.Function):
    """(silu(gate) * up) W' + bias, with or without an adapter.

    Saves gate and up (2 F elements per token) and, with an adapter, h A' (R per token). The product
    h = silu(gate) * up is made again in the backward, where silu(gate) is needed anyway.
    """

    @staticmethod
    def forward(
        ctx: Any,
        gate: torch.Tensor,
        up: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        A: torch.Tensor | None,
        B: torch.Tensor | None,
        s: float,
    ) -> torch.Tensor:
        h = F.silu(gate).mul_(up)
        y = F.linear(h, weight, bias)
        down = None
        if A is not None and B is not None:
            down = _low_rank(_flat(h), _flat(y), A, B, s)
        ctx.save_for_backward(gate, up, weight, A, B, down)
        ctx.scale = s
        return y

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Grads:
        gate, up, weight, A, B, down = ctx.saved_tensors
        need = ctx.needs_input_grad
        grad = _flat(grads[0])
        grad_h = grad @ weight
        grad_weight = grad_bias = grad_A = grad_B = None
        act = F.silu(_flat(gate))
        h = act * _flat(up) if need[2] or A is not None else None
        if A is not None:
            low = (grad @ B).mul_(ctx.scale)
            grad_h.addmm_(low, A)
            grad_A, grad_B = low.T @ h, (grad.T @ down).mul_(ctx.scale)
        if need[2]:
            grad_weight = grad.T @ h
        if need[3]:
            grad_bias = grad.sum(0)
        del h
        grad_up = act.mul_(grad_h).view(up.shape)
        grad_gate = torch.ops.aten.silu_backward(grad_h.mul_(_flat(up)), _flat(gate)).view(gate.shape)
        return grad_gate, grad_up, grad_weight, grad_bias, grad_A, grad_B, None


def adapted_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    A: torch.Tensor,
    B: torch.Tensor,
    s: float,
) -> torch.Tensor:
    """x W' + bias + s (x A') B' over a frozen weight and bias; all in one dtype."""
    y: torch.Tensor = _AdaptedLinear.apply(x, weight, bias, A, B, s)
    return y


def add_adapter(
    base: torch.Tensor, x: torch.Tensor, A: torch.Tensor, B: torch.Tensor, s: float
) -> torch.Tensor:
    """base + s (x A') B', in place; nobody else may have kept `base` for its backward."""
    y: torch.Tensor = _AddAdapter.apply(base, x, A, B, s)
    return y


def gated_product(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up."""
    y: torch.Tensor = _GatedProduct.apply(gate, up)
    return y


def gated_linear(
    gate: torch.Tensor,
    up: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    A: torch.Tensor | None = None,
    B: torch.Tensor | None = None,
    s: float = 1.0,
) -> torch.Tensor:
    """(silu(gate) * up) W' + bias [+ s (h A') B']; all in one dtype."""
    y: torch.Tensor = _GatedLinear.apply(gate, up, weight, bias, A, B, s)
    return y
