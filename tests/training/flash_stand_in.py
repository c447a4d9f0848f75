"""FlashAttention without a GPU: the package's own definition of its variable-length call, written out in torch.

It shows that the model call hands over where documents end; the kernel itself runs on GPUs only.
"""

from typing import Any

import pytest
import torch
from transformers import modeling_flash_attention_utils as flash


def varlen(
    q: torch.Tensor,  # (T, N, D)
    k: torch.Tensor,  # (T, K, D)
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    **_: Any,
) -> torch.Tensor:
    """Attention of each stretch between two entries of `cu_seqlens_q` by itself: (T, N, D)."""
    assert causal and not dropout_p and cu_seqlens_q.tolist() == cu_seqlens_k.tolist()
    assert max_seqlen_q == max_seqlen_k == int(cu_seqlens_q.diff().max())
    groups = q.shape[1] // k.shape[1]
    out = torch.empty_like(q)
    for first, last in zip(cu_seqlens_q.tolist(), cu_seqlens_q.tolist()[1:], strict=False):
        part = slice(first, last)
        key = k[part].repeat_interleave(groups, dim=1)
        value = v[part].repeat_interleave(groups, dim=1)
        scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
        scores = torch.einsum("tnd,snd->nts", q[part], key) * scale
        if softcap:
            scores = torch.tanh(scores / softcap) * softcap
        t, s = torch.meshgrid(torch.arange(last - first), torch.arange(last - first), indexing="ij")
        seen = s <= t
        if window_size[0] >= 0:
            seen &= s >= t - window_size[0]
        out[part] = torch.einsum("nts,snd->tnd", scores.masked_fill(~seen, float("-inf")).softmax(-1), value)
    return out


def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put `varlen` in the place of the package."""

    def no_lengths(*_: Any, **__: Any) -> None:
        raise AssertionError(
            "FlashAttention was called without the lengths of documents: they see each other"
        )

    functions = (no_lengths, varlen, None, None, None)
    monkeypatch.setattr(flash, "_lazy_imports", lambda *_, **__: functions)
    monkeypatch.setattr(flash, "_loaded_implementation", None)
