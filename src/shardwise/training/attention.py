"""Attention in which documents of a packed row cannot see each other, on every device.

A micro-batch is one row of T tokens, documents one after the other (1, T). Each document runs through
`scaled_dot_product_attention` by itself: causal, no mask tensor, no padding, cost linear in documents.

B = 1, N query heads, K key-value heads, T tokens of the row, S tokens of one document, D head size.
"""

from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface

from shardwise.training.kernels.attention import document_products

NAME = "shardwise_documents"


class Documents:
    """Lengths of a row's documents, in an object into which torch.compile does not look.

    Seen as a tuple, every new number of documents would be compiled anew.
    """

    __slots__ = ("lengths",)

    def __init__(self, lengths: tuple[int, ...]) -> None:
        self.lengths = lengths


@torch.compiler.disable  # lengths of documents change with every micro-batch, and each would be compiled anew
def document_attention(
    module: torch.nn.Module,
    query: torch.Tensor,  # (B, N, T, D)
    key: torch.Tensor,  # (B, K, T, D)
    value: torch.Tensor,  # (B, K, T, D)
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    document_lengths: Documents | tuple[int, ...] | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    is_causal: bool | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface; returns (B, T, N, D).

    Without `document_lengths` (generation) the row is one document; queries then are the last ones of the keys.
    """
    if isinstance(document_lengths, Documents):
        document_lengths = document_lengths.lengths
    options: dict[str, Any] = {
        "scaling": scaling,
        "dropout": dropout,
        "window": sliding_window,
        "softcap": softcap,
        "sink": s_aux,
    }
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    if document_lengths is not None and causal and _is_plain(query, key, document_lengths, options):
        return _on_cpu(query, key, value, document_lengths, scaling), None
    if document_lengths is None or len(document_lengths) == 1:
        out = _attend(query, key, value, bool(causal), **options)
        return out.transpose(1, 2), None
    parts, start = [], 0
    for length in document_lengths:
        part = slice(start, start + length)
        parts.append(_attend(query[:, :, part], key[:, :, part], value[:, :, part], bool(causal), **options))
        start += length
    return torch.cat([p.transpose(1, 2) for p in parts], dim=1), None


def _is_plain(
    query: torch.Tensor, key: torch.Tensor, lengths: tuple[int, ...], options: dict[str, Any]
) -> bool:
    """Nothing but causal attention on a CPU, where matrix products of our own beat torch's flash kernel."""
    window = options["window"]
    return (
        query.device.type == "cpu"
        and query.shape[2] == key.shape[2] == sum(lengths)
        and (window is None or window >= max(lengths))
        and not options["dropout"]
        and options["softcap"] is None
        and options["sink"] is None
    )


def _on_cpu(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    lengths: tuple[int, ...],
    scaling: float | None,
) -> torch.Tensor:
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return document_products(query, key, value, lengths, scale)


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    causal: bool,
    scaling: float | None,
    dropout: float,
    window: int | None,
    softcap: float | None,
    sink: torch.Tensor | None,
) -> torch.Tensor:
    """One document: (B, N, S, D) out."""
    S, L = query.shape[2], key.shape[2]
    masked = (window is not None and window < L) or 1 < S < L
    mask = _band(S, L, window, query.device) if masked and causal else None
    if softcap is not None or sink is not None:  # no fused kernel has these
        return _written_out(query, key, value, causal, mask, scaling, softcap, sink)
    grouped = query.shape[1] != key.shape[1]
    if grouped and query.is_cuda and (mask is not None or query.dtype == torch.float32):
        # Of torch's kernels only flash groups heads, and it has neither masks nor fp32; the others would go through
        # the written-out form, with all scores in memory.
        heads = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(heads, 1), value.repeat_interleave(heads, 1)
        grouped = False
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        dropout_p=dropout,
        is_causal=causal and mask is None and S > 1,
        scale=scaling,
        enable_gqa=grouped,
    )


def _band(S: int, L: int, window: int | None, device: torch.device) -> torch.Tensor:
    """(S, L), true where query i (the last S of L positions) may see key j."""
    i = torch.arange(L - S, L, device=device)[:, None]
    j = torch.arange(L, device=device)[None, :]
    return (j <= i) & (j > i - window) if window is not None else j <= i


def _written_out(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    causal: bool,
    mask: torch.Tensor | None,
    scaling: float | None,
    softcap: float | None,
    sink: torch.Tensor | None,  # (N,): a logit per head that takes probability and gives no value
) -> torch.Tensor:
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    S, L = query.shape[2], key.shape[2]
    scores = query @ key.transpose(2, 3) * (scaling if scaling is not None else query.shape[3] ** -0.5)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if causal and mask is None:
        mask = _band(S, L, None, query.device)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    if sink is not None:
        column = sink.reshape(1, -1, 1, 1).expand(scores.shape[0], -1, S, 1).to(scores.dtype)
        scores = torch.cat([scores, column], dim=-1)
    weights = F.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    return weights[..., :L] @ value


AttentionInterface.register(NAME, document_attention)
