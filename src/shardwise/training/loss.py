"""Cross-entropy over labelled positions only, without ever holding all logits.

N labelled positions, H hidden size, V vocabulary.
"""

from typing import Any

import torch
import torch.nn.functional as F

from shardwise.training.kernels.exact import exact_bf16

# Logits of one chunk, whatever the vocabulary: 2^25 fp32 elements = 128 MiB on an accelerator. On a CPU 2^23: passes
# over the logits then run in the last-level cache, and the matrix is still read seldom enough.
CHUNK_LOGITS, CHUNK_LOGITS_CPU = 2**25, 2**23


def chunk_tokens(vocabulary: int, device: str = "cuda") -> int:
    """Labelled positions that go through the output matrix at a time."""
    return max(16, (CHUNK_LOGITS_CPU if device == "cpu" else CHUNK_LOGITS) // vocabulary)


def _on_cpu(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu"


class _LinearCrossEntropy(torch.autograd.Function):
    """Sum of -log softmax(scale * hidden @ weight.T)[target]; gradients are computed along with the value.

    The gradient of the sum with respect to the logits is softmax - onehot, so each chunk's part of the
    gradients of `hidden` and `weight` can be formed while its logits are at hand, and nothing of size N x V is
    kept for the backward pass. `softcap` c replaces logits z by c * tanh(z / c) (Gemma 2).
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: torch.Tensor,
        weight_VH: torch.Tensor,
        targets_N: torch.Tensor,
        scale: float,
        softcap: float | None,
    ) -> torch.Tensor:
        need_hidden, need_weight = ctx.needs_input_grad[0], ctx.needs_input_grad[1]
        grad_hidden = torch.empty_like(hidden_NH) if need_hidden else None
        grad_weight = torch.zeros_like(weight_VH, dtype=torch.float32) if need_weight else None
        total = torch.zeros((), dtype=torch.float32, device=hidden_NH.device)
        on_cpu = _on_cpu(hidden_NH)
        step = max(1, min(chunk_tokens(weight_VH.shape[0], hidden_NH.device.type), hidden_NH.shape[0]))
        # Made once: fresh memory of this size is given back to the system each time, and faulted in again.
        low = hidden_NH.new_empty(step, weight_VH.shape[0])
        full = low if low.dtype == torch.float32 else torch.empty_like(low, dtype=torch.float32)
        for start in range(0, hidden_NH.shape[0], step):
            hidden = hidden_NH[start : start + step]
            target = targets_N[start : start + step, None]
            rounded, logits = low[: len(hidden)], full[: len(hidden)]
            torch.mm(hidden, weight_VH.T, out=rounded)
            if logits is not rounded:
                logits.copy_(rounded)
            if scale != 1.0:
                logits.mul_(scale)
            slope = None
            if softcap is not None:
                logits.div_(softcap).tanh_()
                slope = 1 - logits.square() if need_hidden or need_weight else None
                logits.mul_(softcap)
            chosen, largest = logits.gather(1, target), logits.amax(dim=1, keepdim=True)
            mass = logits.sub_(largest).exp_().sum(dim=1, keepdim=True)
            total += (mass.log() + largest - chosen).sum()
            if not (need_hidden or need_weight):
                continue
            grad = logits.div_(mass)
            grad.scatter_add_(1, target, torch.full_like(mass, -1.0))
            if slope is not None:
                grad.mul_(slope)
            if scale != 1.0:
                grad.mul_(scale)
            if (
                grad_weight is not None and on_cpu
            ):  # one pass over the weight's gradient, in place and in fp32
                with exact_bf16(hidden.dtype):
                    grad_weight.addmm_(grad.T, hidden.float())
            grad = grad if grad.dtype == hidden.dtype else rounded.copy_(grad)
            if grad_hidden is not None:
                torch.mm(grad, weight_VH, out=grad_hidden[start : start + step])
            if grad_weight is not None and not on_cpu:
                grad_weight += grad.T @ hidden
        ctx.weight_dtype = weight_VH.dtype
        ctx.save_for_backward(grad_hidden, grad_weight)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grad_hidden, grad_weight = ctx.saved_tensors
        (upstream,) = grads
        if grad_hidden is not None:
            grad_hidden = grad_hidden.mul_(upstream.to(grad_hidden.dtype))
        if grad_weight is not None:
            grad_weight = grad_weight.mul_(upstream).to(ctx.weight_dtype)
        return grad_hidden, grad_weight, None, None, None


def chunked_cross_entropy(
    hidden_NH: torch.Tensor,
    weight_VH: torch.Tensor,
    targets_N: torch.Tensor,
    scale: float = 1.0,
    softcap: float | None = None,
) -> torch.Tensor:
    """Sum (not mean) of the cross-entropy of N positions, a scalar in fp32. Empty input gives 0."""
    if (
        not torch.is_grad_enabled()
    ):  # the function is told what requires a gradient, not that nobody wants one
        hidden_NH, weight_VH = hidden_NH.detach(), weight_VH.detach()
    result: torch.Tensor = _LinearCrossEntropy.apply(hidden_NH, weight_VH, targets_N, scale, softcap)
    return result


def full_cross_entropy(logits_NV: torch.Tensor, targets_N: torch.Tensor) -> torch.Tensor:
    """The same sum from logits that exist already; holds them in fp32."""
    return F.cross_entropy(logits_NV.float(), targets_N, reduction="sum")
