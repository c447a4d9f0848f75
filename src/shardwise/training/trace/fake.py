"""A model whose tensors have shapes and no bytes, built the way a run builds it, and what fakes cannot do by
themselves.
"""

import copy
import importlib.util
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import nn
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from shardwise.recipe.schema import Recipe
from shardwise.training import attention, loss, optimizers
from shardwise.training.kernels import install, norm
from shardwise.training.model import LossModel, ModelFolder, prepare_for_training
from shardwise.training.trace.storages import StorageLog


class FakeLog(StorageLog):
    """A log on fake tensors: answers the few operations whose result depends on contents."""

    _gemm_4bit: Any = None

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
            dtype = args[0].dtype  # Adam's step must not be 0; an overflow flag must be
            return False if dtype is torch.bool else (1.0 if dtype.is_floating_point else 0)
        if func is self._gemm_4bit and self._fake is not None and self.round_to > 1:
            # On CUDA bitsandbytes makes the whole matrix inside this operation, from 1,537 tokens on at the latest.
            whole = torch.empty(tuple(args[2]), dtype=args[0].dtype, device=args[0].device)
            self._see(whole, None)
            result = func(*args, **kwargs)
            self._see(result, None)  # while the matrix is there
            return result
        if (
            func is torch.ops.c10d._reduce_scatter_base_.default
            and self._fake is not None
            and self.round_to == 1
        ):
            whole = torch.empty_like(
                args[1]
            )  # gloo adds up a copy of the input, of which each rank takes its part
            self._see(whole, None)
            return func(*args, **kwargs)
        if func is torch.ops._c10d_functional.wait_tensor.default and self._fake is not None:
            return args[0]
        return func(*args, **kwargs)


@contextmanager
def fakes(device: str) -> Iterator[FakeTensorMode]:
    """Everything created inside is fake. `device`: whose kernels are imitated, "cpu" or "cuda".

    The fakes themselves lie on the CPU: a build without CUDA cannot make others.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with ExitStack() as stack:
        if device == "cuda":
            stack.enter_context(mock.patch.object(F, "scaled_dot_product_attention", _flash))
            # The fakes' device says cpu, where attention would go through products of our own.
            stack.enter_context(mock.patch.object(loss, "CHUNK_LOGITS_CPU", loss.CHUNK_LOGITS))
            stack.enter_context(mock.patch.object(attention, "_is_plain", lambda *_: False))
            for module in (loss, optimizers):
                stack.enter_context(mock.patch.object(module, "_on_cpu", lambda *_: False))
            stack.enter_context(mock.patch.object(install, "rms_norm", _rms_norm))
        stack.enter_context(mock.patch.object(install, "_compare", _compared))
        if importlib.util.find_spec("bitsandbytes") is not None:
            from bitsandbytes.nn import modules as quantised

            FakeLog._gemm_4bit = torch.ops.bitsandbytes.gemm_4bit.default

            fix = "fix_4bit_weight_quant_state_from_module"
            stack.enter_context(mock.patch.object(quantised, fix, _with_state))
        multithreaded = torch.autograd.is_multithreading_enabled()
        torch.autograd.set_multithreading_enabled(False)
        stack.callback(torch.autograd.set_multithreading_enabled, multithreaded)
        stack.enter_context(mode)
        yield mode


def _flash(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """What CUDA does: flash attention for 16 bits, no mask and values as wide as keys, the memory-efficient kernel
    otherwise.
    """
    narrow = query.dtype in (torch.bfloat16, torch.float16)
    if attn_mask is None and narrow and value.shape[-1] == query.shape[-1]:
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        out: torch.Tensor = flash(query, key, value, dropout_p, is_causal, scale=scale)[0]
        return out
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention
    out = efficient(query, key, value, attn_mask, True, dropout_p, is_causal, scale=scale)[0]
    return out


class _FusedRmsNorm(torch.autograd.Function):
    """torch's fused kernel on CUDA as far as memory goes: keeps its input and one fp32 per row."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        ctx.save_for_backward(x, weight, x.new_empty((*x.shape[:-1], 1), dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, _ = ctx.saved_tensors
        needs = ctx.needs_input_grad
        return torch.empty_like(x) if needs[0] else None, torch.empty_like(weight) if needs[1] else None


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """As `kernels.norm.rms_norm` on CUDA."""
    out: torch.Tensor = (
        _FusedRmsNorm.apply(x, weight) if x.dtype == weight.dtype else norm.rms_norm(x, weight, eps)
    )
    return out


_compare_real = install._compare


def _compared(module: nn.Module, mixin: type) -> str:
    """Norms are compared with their kernel on numbers, as in a run: some families multiply by 1 + weight."""
    if mixin is not install._Norm or next(module.parameters()).device.type != "meta":
        return _compare_real(module, mixin)
    real = copy.deepcopy(module).to_empty(device="cpu")
    for parameter in real.parameters():
        torch.nn.init.normal_(parameter)
    with mock.patch.object(install, "rms_norm", norm.rms_norm):  # not the one that only allocates
        return _compare_real(real, mixin)


def _with_state(layer: Any) -> None:
    """As bitsandbytes does for weights that FSDP gathered; a fake tensor cannot become a Params4bit."""
    if getattr(layer.weight, "quant_state", None) is None:
        layer.weight.quant_state = layer.quant_state


def build_fake(recipe: Recipe, folder: ModelFolder, device: torch.device) -> LossModel:
    """The model as a run builds it, with fake weights on `device`. Call inside `fakes`.

    It is made on the meta device, where swapping parameters (PEFT, bitsandbytes) works, and then filled.
    """
    mode = active_fake_mode()
    assert mode is not None
    with outside(mode):
        model: Any = folder.empty()
        if recipe.method == "qlora":
            _quantise(model, folder, recipe)
        if recipe.method != "full":
            from shardwise.training.adapters.lora import adapt

            with torch.device("meta"):
                model = adapt(model, recipe.lora, recipe.training.seed)
            for parameter in model.parameters():
                if parameter.requires_grad:  # PEFT cannot tell the base's dtype from a meta tensor
                    parameter.data = parameter.data.to(folder.dtype)
        module = prepare_for_training(model, recipe)
    fill(module, device)
    for name in ("to", "bfloat16", "half", "float"):
        setattr(module, name, lambda *_, **__: module)  # fakes cannot be swapped
    return module


def quantisation(module: nn.Module) -> Iterator[torch.Tensor]:
    """Scales and code tables of 4-bit matrices; no module lists them among its parameters or buffers."""
    for part in module.modules():
        state = getattr(part, "quant_state", None)
        for one in (state, getattr(state, "state2", None)):
            for name in ("absmax", "code", "offset"):
                value = getattr(one, name, None)
                if isinstance(value, torch.Tensor):
                    yield value


@contextmanager
def outside(mode: FakeTensorMode) -> Iterator[None]:
    """Leave the fake mode for a while; the meta device needs no fakes."""
    mode.__exit__(None, None, None)
    try:
        yield
    finally:
        mode.__enter__()


def fill(module: nn.Module, device: torch.device) -> None:
    """Replace meta parameters and buffers by fake ones on `device`; shared ones stay shared."""
    made: dict[int, torch.Tensor] = {}
    for owner in module.modules():
        for table in (owner._parameters, owner._buffers):
            for name, tensor in list(table.items()):
                if tensor is None or tensor.device.type != "meta":
                    continue
                if id(tensor) not in made:
                    made[id(tensor)] = _filled(tensor, device)
                table[name] = made[id(tensor)]


def _filled(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    fresh = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    state = getattr(tensor, "quant_state", None)
    if state is not None:
        whole = nn.Parameter(fresh, requires_grad=False)  # a plain one: fakes cannot become another subclass
        whole.quant_state = _state(state, device)
        whole.quant_type = "nf4"
        return whole
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(fresh, requires_grad=tensor.requires_grad)
    return fresh


def _state(state: Any, device: torch.device) -> Any:
    """A 4-bit matrix's scales and code tables, fake."""
    for part in (state, state.state2) if state.nested else (state,):
        for name in ("absmax", "code", "offset"):
            value = getattr(part, name, None)
            if isinstance(value, torch.Tensor):
                setattr(part, name, torch.empty(value.shape, dtype=value.dtype, device=device))
    return state


def _quantise(model: nn.Module, folder: ModelFolder, recipe: Recipe) -> None:
    """Put bitsandbytes' 4-bit layers where transformers would, on the meta device."""
    import bitsandbytes as bnb
    from bitsandbytes.functional import QuantState

    head = model.get_output_embeddings()
    double = recipe.quantization.double_quantization
    for owner in list(model.modules()):
        for name, child in list(owner.named_children()):
            if type(child) is not nn.Linear or child is head:
                continue
            layer = bnb.nn.Linear4bit(
                child.in_features, child.out_features, bias=child.bias is not None,
                compute_dtype=folder.dtype, quant_type="nf4", device="meta",
            )  # fmt: skip
            elements = child.in_features * child.out_features
            blocks = -(-elements // 64)
            with torch.device("meta"):
                code, inner = torch.empty(16), None
                absmax = torch.empty(blocks, dtype=torch.uint8 if double else torch.float32)
                if double:
                    inner = QuantState(
                        absmax=torch.empty(-(-blocks // 256)), blocksize=256, code=torch.empty(256),
                        dtype=torch.float32,
                    )  # fmt: skip
                state = QuantState(
                    absmax=absmax, shape=torch.Size((child.out_features, child.in_features)), code=code,
                    blocksize=64, quant_type="nf4", dtype=folder.dtype,
                    offset=torch.empty(()) if double else None, state2=inner,
                )  # fmt: skip
                data = torch.empty((elements + 1) // 2, 1, dtype=torch.uint8)
            layer.weight = bnb.nn.Params4bit(
                data, requires_grad=False, quant_state=state, quant_type="nf4", bnb_quantized=True
            )
            layer.support_avx512bf16_for_cpu = (
                False  # as adapters/qlora.py: an evaluation would repack the weights
            )
            if child.bias is not None:
                layer.bias = child.bias
            layer.weight.quant_state = layer.quant_state = state
            setattr(owner, name, layer)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
