"""The chunked loss equals the loss from all logits, in value and gradient."""

import pytest
import torch
import torch.nn.functional as F

from shardwise.training import loss as module
from shardwise.training.loss import chunk_tokens, chunked_cross_entropy

N, H, V = 37, 16, 97


@pytest.fixture
def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    hidden = torch.randn(N, H, dtype=torch.float64).float().requires_grad_()
    weight = torch.randn(V, H).requires_grad_()
    return hidden, weight, torch.randint(0, V, (N,))


@pytest.mark.parametrize(("scale", "softcap"), [(1.0, None), (0.25, None), (1.0, 5.0), (0.5, 3.0)])
def test_value_and_gradients_equal_the_full_loss(inputs, scale, softcap, monkeypatch) -> None:
    hidden, weight, targets = inputs
    monkeypatch.setattr(module, "chunk_tokens", lambda *_: 8)  # several chunks, the last one short
    logits = (hidden @ weight.T) * scale
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    expected = F.cross_entropy(logits, targets, reduction="sum")
    expected_grads = torch.autograd.grad(expected * 0.3, (hidden, weight))
    value = chunked_cross_entropy(hidden, weight, targets, scale, softcap)
    grads = torch.autograd.grad(value * 0.3, (hidden, weight))
    torch.testing.assert_close(value, expected, rtol=1e-6, atol=1e-5)
    for got, wanted in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)


def test_frozen_head_gets_no_gradient(inputs) -> None:
    hidden, weight, targets = inputs
    frozen = weight.detach()
    chunked_cross_entropy(hidden, frozen, targets).backward()
    assert hidden.grad is not None and frozen.grad is None


def test_no_targets_give_zero(inputs) -> None:
    hidden, weight, targets = inputs
    assert chunked_cross_entropy(hidden[:0], weight, targets[:0]).item() == 0.0


def test_a_chunk_of_logits_is_bounded_whatever_the_vocabulary() -> None:
    for vocabulary in (32_000, 128_256, 256_000):
        assert chunk_tokens(vocabulary) * vocabulary <= module.CHUNK_LOGITS
