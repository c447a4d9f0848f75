"""Causal attention of packed documents as a few large matrix products per document.

On CPUs torch's flash kernel stays far below the cores' bf16 matrix rate: its tiles are small. Here the queries of
one document go through in blocks of `ROWS`, all query heads of a key head stacked, so that every product is a
batched GEMM of (K, G*R, D) x (K, D, b), and keys after a block are never touched.

N query heads, K key-value heads, G = N / K, T tokens of the row, S tokens of a document, D head size, R rows of a
block, b keys that a block sees.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from shardwise.training.kernels.exact import exact_bf16

ROWS = 128
RARE = 1e-30  # a probability too small to tell its row's sum from: another key outweighs it by 69 nats


# An operator of its own, so that selective checkpointing can keep what it returns by name.
@torch.library.custom_op("shardwise::document_attention", mutates_args=())
def _attention_op(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, lengths: list[int], scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The output (1, T, N, D), and the logarithm of each softmax's sum (N, T) in fp32."""
    _, N, T, _ = query.shape
    out = query.new_empty(T, N, value.shape[-1])
    log_sums = query.new_empty(N, T, dtype=torch.float32)
    masks = _Masks(query.new_empty(0, dtype=torch.float32))
    full = _scratch(query, lengths, torch.float32)
    low = full if query.dtype == torch.float32 else _scratch(query, lengths, query.dtype)
    with exact_bf16(query.dtype):
        for start, end in _documents(lengths):
            q, k, v = (t[0, :, start:end] for t in (query, key, value))
            k_T, v, K = _turned(k, torch.float32), v.contiguous(), k.shape[0]
            for a, b in _blocks(end - start):
                rows, mask = _stack(q[:, a:b], K).float(), masks.of(b - a)
                p = _scores(rows, k_T[:, :, :b], scale, mask, full)
                own = _own(p, b - a).clone()
                torch.softmax(p, dim=-1, out=p)
                own_p = _own(p, b - a)
                sums = own - own_p.log()
                rare = bool(own_p.amin() < RARE)
                if low is not full:
                    p = _shaped(low, p.shape).copy_(p)
                out[start + a : start + b].transpose(0, 1).copy_(torch.bmm(p, v[:, :b]).view(N, b - a, -1))
                if rare:
                    sums = _scores(rows, k_T[:, :, :b], scale, mask, full).logsumexp(-1)
                log_sums[:, start + a : start + b] = sums.view(N, -1)
    return out[None], log_sums


@_attention_op.register_fake
def _attention_shape(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, lengths: list[int], scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    _, N, T, _ = query.shape
    return query.new_empty(1, T, N, value.shape[-1]), query.new_empty(N, T, dtype=torch.float32)


class _DocumentAttention(torch.autograd.Function):
    """Saves q, k and v as given, (N + 2 K) D elements per token, and each softmax's sum, 4 N bytes per token.

    The backward pass makes the probabilities again: one product and one exponential per block. Scratch: in the
    forward the scores of the largest block in fp32, N R b elements, and its probabilities; in the backward
    probabilities and their gradients, both in the inputs' dtype.

    Scores and softmax of the forward and the sums over blocks are in fp32, as in torch's kernels: scores rounded to
    bf16 move a small model's loss by 0.4 %. In the backward a score less the logarithm of its row's sum, which is
    the logarithm of a probability, is rounded to the inputs' dtype: large probabilities lose nothing by it, and the
    gradients of a real model's layers are as exact as those of torch's kernel (benchmarks/attention.py).
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,  # (1, N, T, D)
        key: torch.Tensor,  # (1, K, T, D)
        value: torch.Tensor,  # (1, K, T, D)
        lengths: tuple[int, ...],
        scale: float,
    ) -> torch.Tensor:
        out: torch.Tensor
        out, log_sums = torch.ops.shardwise.document_attention(query, key, value, lengths, scale)
        ctx.save_for_backward(query, key, value, log_sums)
        ctx.lengths, ctx.scale = lengths, scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, log_sums = ctx.saved_tensors
        grad_out = grads[0][0].transpose(0, 1)  # (N, T, D)
        scale, masks = ctx.scale, _Masks(query)
        # (T, heads, D) in memory, as the projections before it want it.
        grad_q, grad_k, grad_v = (
            t.new_empty(t.shape[2], t.shape[1], t.shape[3]).transpose(0, 1) for t in (query, key, value)
        )
        low, low_grad = (_scratch(query, ctx.lengths, query.dtype) for _ in range(2))
        for start, end in _documents(ctx.lengths):
            q, k, v = (t[0, :, start:end] for t in (query, key, value))
            K, S = k.shape[:2]
            q_less, k_T = _with_sums(q, k, log_sums[:, start:end], scale)
            k, v_T = k.contiguous(), _turned(v, v.dtype)
            sum_k = torch.zeros_like(k, dtype=torch.float32)
            sum_v = torch.zeros(v.shape, dtype=torch.float32)
            for a, b in _blocks(S):
                rows, g = _stack(q[:, a:b], K), _stack(grad_out[:, start + a : start + b], K)
                p = _scores(_stack(q_less[:, a:b], K), k_T[:, :, :b], scale, masks.of(b - a), low).exp_()
                sum_v[:, :b] += torch.bmm(p.transpose(1, 2), g)
                grad_p = torch.bmm(g, v_T[:, :, :b], out=_shaped(low_grad, p.shape))
                grad_s = torch._softmax_backward_data(grad_p, p, -1, p.dtype, grad_input=grad_p)
                part = torch.bmm(grad_s, k[:, :b]).mul_(scale)
                grad_q[:, start + a : start + b] = part.view(-1, b - a, part.shape[-1])
                sum_k[:, :b] += torch.bmm(grad_s.transpose(1, 2), rows)
            grad_k[:, start:end] = sum_k.mul_(scale)
            grad_v[:, start:end] = sum_v
        return grad_q[None], grad_k[None], grad_v[None], None, None


def _documents(lengths: Sequence[int]) -> Iterator[tuple[int, int]]:
    start = 0
    for length in lengths:
        yield start, start + length
        start += length


def _blocks(length: int) -> Iterator[tuple[int, int]]:
    for a in range(0, length, ROWS):
        yield a, min(a + ROWS, length)


def _stack(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """(N, R, D) -> (K, G R, D): query heads that share a key head lie one after the other."""
    return rows.reshape(heads, -1, rows.shape[-1])


def _turned(keys: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """(K, S, D) -> (K, D, S), copied: products read it faster than through a view."""
    K, S, D = keys.shape
    return keys.new_empty(K, D, S, dtype=dtype).copy_(keys.transpose(1, 2))


def _scratch(query: torch.Tensor, lengths: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Room for what one block makes, allocated once: memory that was just written is still in the cache."""
    largest = max((b - a) * b for a, b in _blocks(max(lengths)))
    return query.new_empty(query.shape[1] * largest, dtype=dtype)


def _shaped(scratch: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    return scratch[: math.prod(shape)].view(shape)


def _scores(
    rows: torch.Tensor, k_T: torch.Tensor, scale: float, mask: torch.Tensor, scratch: torch.Tensor
) -> torch.Tensor:
    """(K, G R, b); of the last R keys, the block's own, a row sees those up to itself."""
    K, _, b = k_T.shape
    into = _shaped(scratch, (K, rows.shape[1], b))
    scores = torch.baddbmm(into, rows, k_T, beta=0, alpha=scale, out=into)
    R = mask.shape[0]
    scores.view(K, -1, R, b)[..., b - R :].add_(mask)
    return scores


def _own(pairs: torch.Tensor, rows: int) -> torch.Tensor:
    """(K, G R, b) -> (K, G, R): of every row the value at its own key."""
    K, _, b = pairs.shape
    return pairs.view(K, -1, rows, b)[..., b - rows :].diagonal(dim1=-2, dim2=-1)


def _with_sums(
    q: torch.Tensor, k: torch.Tensor, log_sums: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """q and k, turned, with two columns more, whose product takes `log_sums` from the scores.

    Two, because one number of 8 bits is too coarse for it.
    """
    less = log_sums / -scale
    high = less.to(q.dtype)
    rest = (less - high.float()).to(q.dtype)
    q_less = torch.cat((q, high[..., None], rest[..., None]), dim=-1)
    return q_less, torch.cat((k.transpose(1, 2), k.new_ones(k.shape[0], 2, k.shape[1])), dim=1)


class _Masks:
    """0 on and under the diagonal, -inf above, one per block height, in the dtype of `like`."""

    def __init__(self, like: torch.Tensor) -> None:
        self.like, self.made = like, dict[int, torch.Tensor]()

    def of(self, rows: int) -> torch.Tensor:
        if rows not in self.made:
            self.made[rows] = self.like.new_full((rows, rows), float("-inf")).triu_(1)
        return self.made[rows]


def document_products(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, lengths: tuple[int, ...], scale: float
) -> torch.Tensor:
    """Causal attention inside every document, (1, heads, T, D) in, (1, T, N, D) out, contiguous."""
    out: torch.Tensor = _DocumentAttention.apply(query, key, value, lengths, scale)
    return out
