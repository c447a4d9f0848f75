"""Puts kernels into a model's modules: by structure, one instance at a time, after a numerical comparison.

A module gets a subclass of its own class whose `forward` calls a kernel in the plain case and the original in every
other: several adapters, merged or disabled ones, dropout, mixed dtypes, hooks on parts that the kernel would
read without calling them (ZeRO-3 gathers weights in such hooks). Names, parameters and files stay as they were.
"""

import sys
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from shardwise.training.kernels.linear import adapted_linear, add_adapter, gated_linear, gated_product
from shardwise.training.kernels.norm import rms_norm

# Largest difference between kernel and original, as a share of the original's norm: rounding of a few products.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}
ROWS = 8


@dataclass
class Installed:
    """How many modules of each class have a kernel, and which classes were left alone, with the reason."""

    counts: dict[str, int] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)


class _Norm(nn.Module):
    """Mixed in before an RMS norm's class."""

    weight: torch.Tensor
    shardwise_eps: float

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return rms_norm(hidden_states, self.weight, self.shardwise_eps)


@dataclass(frozen=True)
class _Plain:
    """The tensors of a linear layer that a kernel may read without calling the layer."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    A: torch.Tensor | None = None
    B: torch.Tensor | None = None
    scale: float = 1.0


class _Adapted(nn.Module):
    """Mixed in before PEFT's Linear."""

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        adapter = None if args or kwargs else _adapter(self, x.dtype)
        if adapter is None:
            original: torch.Tensor = super().forward(x, *args, **kwargs)
            return original
        A, B, scale = adapter
        base: Any = self.base_layer
        if _readable(base, x.dtype) and not base.weight.requires_grad:
            return adapted_linear(x, base.weight, base.bias, A, B, scale)
        return add_adapter(base(x), x, A, B, scale)


class _GatedMlp(nn.Module):
    """Mixed in before an MLP down(silu(gate(x)) * up(x))."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_proj(x), self.up_proj(x)
        plain = _plain(self.down_proj, gate.dtype)
        if plain is None:
            y: torch.Tensor = self.down_proj(gated_product(gate, up))
            return y
        return gated_linear(gate, up, plain.weight, plain.bias, plain.A, plain.B, plain.scale)


def install(model: nn.Module) -> Installed:
    """Give every module that a kernel can serve that kernel. A class is compared once per model, on its first module.

    Nothing is compared on meta or fake tensors, which have no numbers: there the structure decides alone.
    """
    result, verdicts = Installed(), dict[tuple[type, int], str]()
    # Inner modules first: an MLP's kernel reads adapters that have been recognised.
    modules = sorted(model.named_modules(), key=lambda item: -item[0].count("."))
    for _, module in modules:
        mixin = _mixin_for(module)
        if mixin is None:
            continue
        original = type(module)
        key = (original, _width(module))
        if key not in verdicts:
            verdicts[key] = _compare(module, mixin)
        if verdicts[key]:
            result.skipped[original.__name__] = verdicts[key]
            continue
        _dress(module, mixin)
        result.counts[original.__name__] = result.counts.get(original.__name__, 0) + 1
    return result


_CLASSES: dict[tuple[type, type], type] = {}


def _dress(module: nn.Module, mixin: type) -> None:
    original = type(module)
    made = _CLASSES.get((mixin, original))
    if made is None:
        made = type(original.__name__, (mixin, original), {"__module__": original.__module__})
        _CLASSES[mixin, original] = made
    if mixin is _Norm:
        module.shardwise_eps = _eps(module)
    module.__class__ = made


def _mixin_for(module: nn.Module) -> type | None:
    if isinstance(module, _Norm | _Adapted | _GatedMlp):
        return None
    parts = {name for name, _ in module.named_children()}
    own = {name for name, _ in module.named_parameters(recurse=False)}
    if type(module).__name__.endswith("RMSNorm") and own == {"weight"} and not parts:
        return _Norm if _eps(module) is not None else None
    if _is_lora_layer(module) and type(module).__name__ in ("Linear", "Linear4bit", "Linear8bitLt"):
        return _Adapted
    if {"gate_proj", "up_proj", "down_proj"} <= parts <= {"gate_proj", "up_proj", "down_proj", "act_fn"}:
        silu = type(getattr(module, "act_fn", None)).__name__ in ("SiLU", "SiLUActivation")
        return _GatedMlp if silu and not own else None
    return None


def _is_lora_layer(module: nn.Module) -> bool:
    """PEFT takes seconds to import: a model that has its layers has imported it."""
    peft = sys.modules.get("peft.tuners.lora.layer")
    return peft is not None and isinstance(module, peft.LoraLayer)


def _eps(module: nn.Module) -> float | None:
    return next(
        (getattr(module, n) for n in ("variance_epsilon", "eps", "epsilon") if hasattr(module, n)), None
    )


def _width(module: nn.Module) -> int:
    return max((p.shape[-1] for p in module.parameters() if p.dim()), default=0)


def _hooked(module: nn.Module) -> bool:
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    )


def _readable(module: nn.Module, dtype: torch.dtype) -> bool:
    """A float matrix that may be multiplied with directly, for no one waits for this layer to be called."""
    return type(module) is nn.Linear and module.weight.dtype == dtype and not _hooked(module)


def _adapter(module: Any, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, float] | None:
    """(A, B, scale) of the one adapter that is at work here, or None when it is not the plain case."""
    if module.disable_adapters or module.merged or len(module.active_adapters) != 1:
        return None
    name = module.active_adapters[0]
    if name not in module.lora_A or name in module.lora_variant:
        return None
    dropout = module.lora_dropout[name]
    A, B = module.lora_A[name], module.lora_B[name]
    if not (_readable(A, dtype) and _readable(B, dtype)) or B.bias is not None:
        return None
    if not isinstance(dropout, nn.Identity) and module.training:
        return None
    return A.weight, B.weight, module.scaling[name]


def _plain(module: nn.Module, dtype: torch.dtype) -> _Plain | None:
    if _readable(module, dtype):
        return _Plain(module.weight, module.bias)
    if not isinstance(module, _Adapted) or _hooked(module):
        return None
    base: Any = module.base_layer
    adapter = _adapter(module, dtype)
    if adapter is None or not _readable(base, dtype):
        return None
    return _Plain(base.weight, base.bias, *adapter)


def _compare(module: nn.Module, mixin: type) -> str:
    """Why the kernel is not this module's formula; empty when outputs and gradients agree."""
    parameters = list(module.parameters())
    first = parameters[0]
    if first.device.type == "meta" or any(isinstance(p, FakeTensor) for p in parameters):
        return ""
    width = _input_width(module)
    dtype = next((p.dtype for p in parameters if p.is_floating_point()), torch.float32)
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(1, ROWS, width, generator=draw).to(first.device, dtype)
    original = type(module)
    with _filled_adapters(module, draw):
        try:
            expected = _run(module, x)
            _dress(module, mixin)
            got = _run(module, x)
        except Exception as problem:  # whatever this class asks for, it keeps its own forward
            return f"its forward could not be compared: {type(problem).__name__}: {problem}"
        finally:
            module.__class__ = original
    for a, b in zip(got, expected, strict=True):
        share = float((a.float() - b.float()).norm() / b.float().norm().clamp_min(1e-30))
        if not share <= TOLERANCE.get(dtype, 0.0):
            return f"its result is another by {share:.1e} of its size"
    return ""


def _input_width(module: Any) -> int:
    if _is_lora_layer(module):
        return int(module.in_features)
    if hasattr(module, "gate_proj"):
        return int(module.gate_proj.in_features)
    return int(module.weight.shape[-1])


def _run(module: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """Output, and the gradients of a random sum of it with respect to the input and whatever is trained."""
    x = x.clone().requires_grad_()
    trained = [p for p in module.parameters() if p.requires_grad]
    with torch.enable_grad():
        y = module(x)
        weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y.device)
        grads = torch.autograd.grad((y.float() * weights).sum(), [x, *trained])
    return [y.detach(), *grads]


class _filled_adapters:
    """Adapters begin with B = 0, which would hide a wrong kernel: random while compared, then as they were."""

    def __init__(self, module: nn.Module, draw: torch.Generator) -> None:
        layers: list[Any] = [m for m in module.modules() if _is_lora_layer(m)]
        self.weights = [b.weight for m in layers for b in m.lora_B.values()]
        self.draw = draw

    @torch.no_grad()
    def __enter__(self) -> None:
        self.kept = [w.clone() for w in self.weights]
        for w in self.weights:
            w.copy_(torch.randn(w.shape, generator=self.draw).mul_(0.1))

    @torch.no_grad()
    def __exit__(self, *error: object) -> None:
        for w, kept in zip(self.weights, self.kept, strict=True):
            w.copy_(kept)
