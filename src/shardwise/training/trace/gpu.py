"""A device "gpu" without a GPU, so that fake tensors on a card and fake tensors in host memory stay apart.

torch's PrivateUse1 device under another name, with streams and events that do nothing. Installed once per process,
and only by a trace that offloads or runs DeepSpeed: it cannot be taken back.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any

import torch
from torch.utils import backend_registration


class _Stream:
    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def wait_stream(self, _: Any) -> None:
        pass

    def wait_event(self, _: Any) -> None:
        pass

    def record_event(self, _: Any = None) -> "_Event":
        return _Event()

    def synchronize(self) -> None:
        pass


class _Event:
    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def record(self, _: Any = None) -> None:
        pass

    def wait(self, _: Any = None) -> None:
        pass

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


class Backend(backend_registration._DummyBackendModule):
    """What torch asks of a device's module."""

    Stream, Event = _Stream, _Event

    def __init__(self) -> None:
        self.default = self.current = _Stream()

    def current_stream(self, *_: Any) -> _Stream:
        return self.current

    def default_stream(self, *_: Any) -> _Stream:
        return self.default

    @contextmanager
    def stream(self, stream: _Stream | None) -> Iterator[None]:
        before, self.current = self.current, stream or self.current
        try:
            yield
        finally:
            self.current = before

    def set_device(self, _: Any) -> None:
        pass

    def synchronize(self, *_: Any) -> None:
        pass

    def device(self, _: Any) -> Any:
        return nullcontext()

    def get_rng_state(self, *_: Any) -> torch.Tensor:
        return torch.zeros(16, dtype=torch.uint8)

    def set_rng_state(self, *_: Any) -> None:
        pass

    def manual_seed(self, _: int) -> None:
        pass

    def empty_cache(self) -> None:
        pass

    def memory_stats(self, *_: Any) -> dict[str, int]:
        return {}

    def is_bf16_supported(self) -> bool:
        return True

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]


# Operations that torch takes apart on devices it does not know, where CUDA has one kernel.
_KERNELS = torch.library.Library("aten", "IMPL")


@cache
def gpu() -> torch.device:
    """The device, made on the first call."""
    backend_registration._setup_privateuseone_for_python_backend("gpu", backend_module=Backend())
    torch.Tensor.record_stream = lambda *_: None
    _KERNELS.impl("silu_backward", lambda grad, x: torch.empty_like(x), "PrivateUse1")
    return torch.device("gpu", 0)
