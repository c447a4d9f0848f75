"""A model whose tensors have shapes and no bytes, built the way a run builds it, and what fakes cannot do by
themselves.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import nn
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import FakeTensorMode

from shardwise.recipe.schema import Recipe
from shardwise.training import attention, loss
from shardwise.training.model import LossModel, ModelFolder, prepare_for_training
from shardwise.training.trace.storages import StorageLog


class FakeLog(StorageLog):
    """A log on fake tensors: answers the few operations whose result depends on contents."""

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and self._fake is not None:
            dtype = args[0].dtype  # Adam's step must not be 0; an overflow flag must be
            return False if dtype is torch.bool else (1.0 if dtype.is_floating_point else 0)
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
    """What CUDA does: flash attention for 16 bits and no mask, the memory-efficient kernel otherwise."""
    if attn_mask is None and query.dtype in (torch.bfloat16, torch.float16):
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        out: torch.Tensor = flash(query, key, value, dropout_p, is_causal, scale=scale)[0]
        return out
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention
    out = efficient(query, key, value, attn_mask, True, dropout_p, is_causal, scale=scale)[0]
    return out


def build_fake(recipe: Recipe, folder: ModelFolder) -> LossModel:
    """The model as a run builds it, with fake weights. Call inside `fakes`.

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
    fill(module)
    module.to = lambda *_, **__: module  # fakes cannot be swapped
    return module


@contextmanager
def outside(mode: FakeTensorMode) -> Iterator[None]:
    """Leave the fake mode for a while; the meta device needs no fakes."""
    mode.__exit__(None, None, None)
    try:
        yield
    finally:
        mode.__enter__()


def fill(module: nn.Module) -> None:
    """Replace meta parameters and buffers by fake ones on the CPU; shared ones stay shared."""
    made: dict[int, torch.Tensor] = {}
    for owner in module.modules():
        for table in (owner._parameters, owner._buffers):
            for name, tensor in list(table.items()):
                if tensor is None or tensor.device.type != "meta":
                    continue
                if id(tensor) not in made:
                    made[id(tensor)] = _filled(tensor)
                table[name] = made[id(tensor)]


def _filled(tensor: torch.Tensor) -> torch.Tensor:
    fresh = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    state = getattr(tensor, "quant_state", None)
    if state is not None:
        whole = nn.Parameter(fresh, requires_grad=False)  # a plain one: fakes cannot become another subclass
        whole.quant_state = _state(state)
        whole.quant_type = "nf4"
        return whole
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(fresh, requires_grad=tensor.requires_grad)
    return fresh


def _state(state: Any) -> Any:
    """A 4-bit matrix's scales and code tables, fake."""
    for part in (state, state.state2) if state.nested else (state,):
        for name in ("absmax", "code", "offset"):
            value = getattr(part, name, None)
            if isinstance(value, torch.Tensor):
                setattr(part, name, torch.empty(value.shape, dtype=value.dtype, device="cpu"))
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
            if child.bias is not None:
                layer.bias = child.bias
            layer.weight.quant_state = state
            setattr(owner, name, layer)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
