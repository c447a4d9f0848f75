"""Every kernel gives what the modules it replaces give: in fp32 to rounding, in bf16 no further from the truth."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from shardwise.training.kernels import linear
from shardwise.training.kernels.attention import ROWS, document_products
from shardwise.training.kernels.exact import exact_bf16
from shardwise.training.kernels.norm import rms_norm

Tensors = list[torch.Tensor]


def results(f: Callable[..., torch.Tensor], inputs: Tensors, dtype: torch.dtype) -> Tensors:
    """Output, and the gradients of its product with a fixed random tensor."""
    leaves = [t.to(dtype).requires_grad_() for t in inputs]
    y = f(*leaves)
    g = torch.randn(y.shape, generator=torch.Generator().manual_seed(9)).to(dtype)
    return [y.detach(), *torch.autograd.grad((y * g).sum(), leaves)]


def off(got: Tensors, truth: Tensors) -> float:
    return max(
        float((a.double() - b.double()).norm() / b.double().norm()) for a, b in zip(got, truth, strict=True)
    )


def compare(kernel: Callable[..., torch.Tensor], plain: Callable[..., torch.Tensor], inputs: Tensors) -> None:
    """Against the plain formula in fp64: fp32 to rounding, bf16 to 1.5 times its own error."""
    truth = results(plain, inputs, torch.float64)
    assert off(results(kernel, inputs, torch.float32), truth) < 3e-6
    low = [t.bfloat16().float() for t in inputs]
    truth = results(plain, low, torch.float64)
    own = off(results(plain, low, torch.bfloat16), truth)
    assert off(results(kernel, low, torch.bfloat16), truth) < 1.5 * own + 1e-3


def draw(*shapes: tuple[int, ...]) -> Tensors:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(s, generator=generator) for s in shapes]


def test_rms_norm_is_llamas() -> None:
    def llama(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        norm = LlamaRMSNorm(weight.shape[0], eps=1e-5)
        if x.dtype == torch.float64:
            return weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
        return torch.func.functional_call(norm, {"weight": weight}, x)

    compare(lambda x, w: rms_norm(x, w, 1e-5), llama, draw((2, 7, 48), (48,)))


def test_rms_norm_keeps_its_input_whole() -> None:
    x, w = draw((3, 8), (8,))
    before = x.clone()
    rms_norm(x, w, 1e-5)
    assert torch.equal(x, before)


def test_an_adapted_linear_layer_is_base_plus_low_rank() -> None:
    weight, bias = (t / 5 for t in draw((24, 40), (24,)))

    def plain(x: torch.Tensor, A: torch.Tensor, B: torch.Tensor) -> torch.Tensor:
        return F.linear(x, weight.to(x.dtype), bias.to(x.dtype)) + F.linear(F.linear(x, A), B) * 2.0

    def kernel(x: torch.Tensor, A: torch.Tensor, B: torch.Tensor) -> torch.Tensor:
        return linear.adapted_linear(x, weight.to(x.dtype), bias.to(x.dtype), A, B, 2.0)

    def added(x: torch.Tensor, A: torch.Tensor, B: torch.Tensor) -> torch.Tensor:
        return linear.add_adapter(F.linear(x, weight.to(x.dtype), bias.to(x.dtype)), x, A, B, 2.0)

    inputs = draw((1, 9, 40), (4, 40), (24, 4))
    compare(kernel, plain, inputs)
    compare(added, plain, inputs)


def test_a_gated_mlps_end_is_the_product_through_its_matrix() -> None:
    def plain(gate: torch.Tensor, up: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return F.linear(F.silu(gate) * up, w, b)

    def adapted(gate: torch.Tensor, up: torch.Tensor, A: torch.Tensor, B: torch.Tensor) -> torch.Tensor:
        h = F.silu(gate) * up
        return F.linear(h, weight.to(h.dtype)) + F.linear(F.linear(h, A), B) * 0.5

    gate, up, weight, bias = draw((1, 6, 32), (1, 6, 32), (16, 32), (16,))
    compare(lambda g, u: linear.gated_product(g, u), lambda g, u: F.silu(g) * u, [gate, up])
    compare(lambda g, u, w, b: linear.gated_linear(g, u, w, b), plain, [gate, up, weight, bias])
    A, B = draw((4, 32), (16, 4))
    compare(
        lambda g, u, a, b: linear.gated_linear(g, u, weight.to(g.dtype), None, a, b, 0.5),
        adapted,
        [gate, up, A, B],
    )


def each_document(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: tuple[int, ...], scale: float
) -> torch.Tensor:
    """torch's attention, one document after the other."""
    parts = [
        F.scaled_dot_product_attention(*p, is_causal=True, scale=scale, enable_gqa=True)
        for p in zip(*(t.split(lengths, dim=2) for t in (q, k, v)), strict=True)
    ]
    return torch.cat(parts, dim=2).transpose(1, 2)


@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (3, 1)])
@pytest.mark.parametrize("lengths", [(5,), (1, 2, 9), (ROWS, 3, ROWS + 1), (2 * ROWS + 7,)])
def test_attention_of_documents_is_attention_of_each(
    lengths: tuple[int, ...], heads: tuple[int, int]
) -> None:
    T = sum(lengths)
    q, k, v = draw((1, T, heads[0], 16), (1, T, heads[1], 16), (1, T, heads[1], 16))
    inputs = [t.transpose(1, 2) for t in (q, k, v)]
    compare(
        lambda q, k, v: document_products(q, k, v, lengths, 0.3),
        lambda q, k, v: each_document(q, k, v, lengths, 0.3),
        inputs,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_where_a_tokens_own_key_counts_for_nothing(dtype: torch.dtype) -> None:
    """Its probability is 0 in fp32, so the sum of its row has to come from elsewhere."""
    T = 2 * ROWS + 5
    q, k, v = draw((1, 2, T, 16), (1, 1, T, 16), (1, 1, T, 16))
    q[..., 0], k[..., 0] = 20.0, 0.0
    k[:, :, 7, 0] = 30.0  # 180 nats more than any other key
    lengths = (T - 30, 30)

    def passed(dtype: torch.dtype, attend: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
        inputs = [t.to(dtype, copy=True).requires_grad_() for t in (q, k, v)]
        out = attend(*inputs)
        out.backward(torch.ones_like(out))
        return [out, *(t.grad for t in inputs if t.grad is not None)]

    got = passed(dtype, lambda *t: document_products(*t, lengths, 0.3))
    wanted = passed(torch.float64, lambda *t: each_document(*t, lengths, 0.3))
    for a, b in zip(got, wanted, strict=True):
        assert (a.double() - b).norm() < (1e-3 if dtype == torch.float32 else 2e-2) * b.norm()


def saved_bytes(f: Callable[[], torch.Tensor]) -> int:
    """Bytes of distinct storages that autograd keeps."""
    seen: dict[int, int] = {}

    def pack(t: torch.Tensor) -> torch.Tensor:
        seen[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        f()
    return sum(seen.values())


def test_what_the_kernels_save_is_what_they_say() -> None:
    T, H, W, R = 10, 32, 64, 4
    x, g, u = (t.bfloat16().requires_grad_() for t in draw((T, H), (T, W), (T, W)))
    weight, A, B, n = (t.bfloat16() for t in draw((H, W), (R, W), (H, R), (H,)))
    A, B = A.requires_grad_(), B.requires_grad_()
    fixed = 2 * (weight.numel() + A.numel() + B.numel())
    assert saved_bytes(lambda: rms_norm(x, n, 1e-5)) == T * (2 * H + 4) + 2 * H
    assert saved_bytes(lambda: linear.gated_product(g, u)) == T * 4 * W
    assert saved_bytes(lambda: linear.adapted_linear(g, weight, None, A, B, 1.0)) == T * 2 * (W + R) + fixed
    assert (
        saved_bytes(lambda: linear.gated_linear(g, u, weight, None, A, B, 1.0)) == T * 2 * (2 * W + R) + fixed
    )
    q, k = (t.bfloat16().requires_grad_() for t in draw((1, 4, T, 8), (1, 2, T, 8)))
    sums = T * 4 * 4
    assert (
        saved_bytes(lambda: document_products(q, k, k.clone(), (4, 6), 1.0)) == T * 2 * (4 + 2 + 2) * 8 + sums
    )


def test_attention_runs_on_fake_tensors_and_under_selective_checkpointing() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils.checkpoint import checkpoint

    from shardwise.training.model import _selective

    q, k, v = (t.requires_grad_() for t in draw((1, 4, 7, 8), (1, 2, 7, 8), (1, 2, 7, 8)))
    expected = torch.autograd.grad(document_products(q, k, v, (3, 4), 1.0).sum(), (q, k, v))
    out = checkpoint(
        lambda *t: document_products(*t, (3, 4), 1.0), q, k, v, use_reentrant=False, context_fn=_selective
    )
    for a, b in zip(torch.autograd.grad(out.sum(), (q, k, v)), expected, strict=True):
        torch.testing.assert_close(a, b)
    with FakeTensorMode():
        f = [torch.empty(t.shape).requires_grad_() for t in (q, k, v)]
        out = document_products(f[0], f[1], f[2], (3, 4), 1.0)
        out.sum().backward()
        assert out.shape == (1, 7, 4, 8) and f[1].grad is not None and f[1].grad.shape == k.shape


def test_scores_by_bf16_instructions_are_those_of_fp32_products() -> None:
    draw = torch.Generator().manual_seed(3)
    q, k = (torch.randn(3, rows, 64, generator=draw).bfloat16().float() for rows in (384, 512))
    expected = torch.bmm(q, k.transpose(1, 2))
    with exact_bf16(torch.bfloat16):
        got = torch.bmm(q, k.transpose(1, 2))
    assert (got - expected).abs().max() < 1e-5 * expected.abs().max()  # rounded to bf16 it would be 4e-3


def test_other_products_keep_their_precision() -> None:
    before = torch.backends.mkldnn.matmul.fp32_precision
    with exact_bf16(torch.float32):
        assert torch.backends.mkldnn.matmul.fp32_precision == before
    with pytest.raises(RuntimeError), exact_bf16(torch.bfloat16):
        raise RuntimeError
    assert torch.backends.mkldnn.matmul.fp32_precision == before
