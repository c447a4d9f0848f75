"""RMS norm: y = weight * (x / sqrt(mean(x^2) + eps)), in fp32 inside, rounded where transformers rounds."""

from typing import Any

import torch
import torch.nn.functional as F


class _RmsNorm(torch.autograd.Function):
    """Saves x as given and one fp32 per row (1 / rms); transformers' own keeps x twice and more in fp32."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        full = x.float()
        if full is x:
            full = x.clone()
        rstd = torch.linalg.vector_norm(full, dim=-1, keepdim=True)
        rstd = rstd.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, rstd)
        return weight * full.mul_(rstd).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """With n = x * rstd and g = weight * grad: dx = rstd * (g - n * mean(g n)), dweight = sum(grad n)."""
        x, weight, rstd = ctx.saved_tensors
        (grad,) = grads
        normed = x.float() * rstd
        grad_weight = None
        if ctx.needs_input_grad[1]:
            rows = (grad.float() * normed).flatten(0, -2).sum(0)
            grad_weight = rows.to(weight.dtype)
        if not ctx.needs_input_grad[0]:
            return None, grad_weight, None
        g = (grad * weight).float()
        mean = (g * normed).mean(-1, keepdim=True)
        grad_x = g.sub_(normed.mul_(mean)).mul_(rstd).to(x.dtype)
        return grad_x, grad_weight, None


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """(..., H) -> (..., H). On CUDA torch's fused kernel, which saves the same."""
    if x.is_cuda and x.dtype == weight.dtype:
        return F.rms_norm(x, weight.shape, weight, eps)
    y: torch.Tensor = _RmsNorm.apply(x, weight, eps)
    return y
