"""Causal attention of packed documents as a few large matrix products per document.

On CPUs torch's flash kernel stays far below the cores' bf16 matrix rate: its tiles are small. Here the queries of
one document go through in blocks of `ROWS`, all query heads of a key head stacked, so that every product is a
batched GEMM of (K, G*R, D) x (K, D, b), and keys after a block are never touched.

N query heads, K key-value heads, G = N / K, T tokens of the row, S tokens of a document, D head size, R rows of a
block, b keys that a block sees.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from shardwise.training.kernels.exact import exact_bf16

ROWS = 128


# An operator of its own, so that selective checkpointing can keep its output by name.
@torch.library.custom_op("shardwise::document_attention", mutates_args=())
def _attention_op(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, lengths: list[int], scale: float
) -> torch.Tensor:
    _, N, T, _ = query.shape
    out = query.new_empty(T, N, value.shape[-1])
    masks = _Masks(query)
    with exact_bf16(query.dtype):
        for start, end in _documents(lengths):
            q, k, v = (t[0, :, start:end] for t in (query, key, value))
            k_full, v, K = k.float().contiguous(), v.contiguous(), k.shape[0]
            for a, b in _blocks(end - start):
                p = _probabilities(_stack(q[:, a:b], K), k_full[:, :b], scale, masks.of(b - a)).to(v.dtype)
                out[start + a : start + b].transpose(0, 1).copy_(torch.bmm(p, v[:, :b]).view(N, b - a, -1))
    return out[None]


@_attention_op.register_fake
def _attention_shape(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, lengths: list[int], scale: float
) -> torch.Tensor:
    _, N, T, _ = query.shape
    return query.new_empty(1, T, N, value.shape[-1])


class _DocumentAttention(torch.autograd.Function):
    """Saves q, k and v as given: (N + 2 K) D elements per token, and neither output nor probabilities.

    The backward pass makes the probabilities again: one product and one softmax per block. Scratch of a block: its
    scores and probabilities in fp32, N R b elements each; in the backward also three of the inputs' dtype. Scores,
    softmax and the sums over blocks are in fp32, as in torch's kernels: scores rounded to bf16 move a small model's
    loss by 0.4 %. The rest is in the inputs' dtype, the softmax's backward too, whose sums in one row are in fp32.
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
        out: torch.Tensor = torch.ops.shardwise.document_attention(query, key, value, lengths, scale)
        ctx.save_for_backward(query, key, value)
        ctx.lengths, ctx.scale = lengths, scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value = ctx.saved_tensors
        grad_out = grads[0][0].transpose(0, 1)  # (N, T, D)
        scale, masks = ctx.scale, _Masks(query)
        # (T, heads, D) in memory, as the projections before it want it.
        grad_q, grad_k, grad_v = (
            t.new_empty(t.shape[2], t.shape[1], t.shape[3]).transpose(0, 1) for t in (query, key, value)
        )
        with exact_bf16(query.dtype):
            for start, end in _documents(ctx.lengths):
                q, k, v = (t[0, :, start:end] for t in (query, key, value))
                k, v = k.contiguous(), v.contiguous()
                K, S = k.shape[:2]
                k_full = k.float()
                sum_k = torch.zeros_like(k, dtype=torch.float32)
                sum_v = torch.zeros_like(v, dtype=torch.float32)
                for a, b in _blocks(S):
                    rows = _stack(q[:, a:b], K)
                    g = _stack(grad_out[:, start + a : start + b], K)
                    p = _probabilities(rows, k_full[:, :b], scale, masks.of(b - a)).to(g.dtype)
                    sum_v[:, :b] += torch.bmm(p.transpose(1, 2), g)
                    grad_p = torch.bmm(g, v[:, :b].transpose(1, 2))
                    grad_s = torch._softmax_backward_data(grad_p, p, -1, p.dtype)
                    del p, grad_p
                    part = torch.bmm(grad_s, k[:, :b]).mul_(scale)
                    grad_q[:, start + a : start + b] = part.view(-1, b - a, part.shape[-1])
                    sum_k[:, :b] += torch.bmm(grad_s.transpose(1, 2), rows)
                    del grad_s  # not beside the next block's scores
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


def _probabilities(q: torch.Tensor, k: torch.Tensor, scale: float, mask: torch.Tensor) -> torch.Tensor:
    """(K, G R, b) in fp32, from k in fp32; of the last R keys, the block's own, a row sees those up to itself."""
    K, b = k.shape[:2]
    scores = torch.bmm(q.float(), k.transpose(1, 2)).mul_(scale)
    rows = mask.shape[0]
    scores.view(K, -1, rows, b)[..., b - rows :].add_(mask)
    return torch.softmax(scores, dim=-1)


class _Masks:
    """0 on and under the diagonal, -inf above, one per block height."""

    def __init__(self, like: torch.Tensor) -> None:
        self.like, self.made = like, dict[int, torch.Tensor]()

    def of(self, rows: int) -> torch.Tensor:
        if rows not in self.made:
            self.made[rows] = self.like.new_full((rows, rows), float("-inf"), dtype=torch.float32).triu_(1)
        return self.made[rows]


def document_products(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, lengths: tuple[int, ...], scale: float
) -> torch.Tensor:
    """Causal attention inside every document, (1, heads, T, D) in, (1, T, N, D) out, contiguous."""
    out: torch.Tensor = _DocumentAttention.apply(query, key, value, lengths, scale)
    return out
