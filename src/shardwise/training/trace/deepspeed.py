"""What the real DeepSpeed engine needs to run on fake tensors: peers that answer, and a card that is not there."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch

from shardwise.training.trace.gpu import Backend, gpu

_GIB = 2**30


def _accelerator() -> Any:
    """DeepSpeed's view of the device "gpu": streams of their own, asynchronous, memory apart from the host's."""
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    device = gpu()

    class Accelerator(CPU_Accelerator):
        def device_name(self, index: int | None = None) -> str:
            return "gpu" if index is None else f"gpu:{index}"

        def device(self, index: int | None = None) -> torch.device:
            return device

        def current_device_name(self) -> str:
            return "gpu:0"

        def current_device(self) -> int:
            return 0

        def is_synchronized_device(self) -> bool:
            return False

        def use_host_timers(self) -> bool:
            return True

        def resolves_data_dependency(self) -> bool:
            return True

        def handles_memory_backpressure(self) -> bool:
            return True

        def Stream(self, *_: Any, **__: Any) -> Any:
            return Backend.Stream()

        def stream(self, stream: Any) -> Any:
            return torch.gpu.stream(stream)

        def current_stream(self, *_: Any) -> Any:
            return torch.gpu.current_stream()

        def default_stream(self, *_: Any) -> Any:
            return torch.gpu.default_stream()

        @property
        def Event(self) -> Any:
            return Backend.Event

        def on_accelerator(self, tensor: torch.Tensor) -> bool:
            return tensor.device.type == "gpu"

        def pin_memory(self, tensor: torch.Tensor, align_bytes: int = 1) -> torch.Tensor:
            return tensor

        def is_pinned(self, tensor: torch.Tensor) -> bool:
            return True

        def total_memory(self, index: int | None = None) -> int:
            return 80 * _GIB

        def available_memory(self, index: int | None = None) -> int:
            return 80 * _GIB

        def memory_allocated(self, index: int | None = None) -> int:
            return 0

        def synchronize(self, index: int | None = None) -> None:
            pass

    return Accelerator()


def _on_gpu(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """torch.tensor without a value on the device "gpu", to which nothing real can be copied."""

    def tensor(data: Any, *, device: Any = None, **options: Any) -> torch.Tensor:
        if device is None or torch.device(device).type != "gpu":
            return make(data, device=device, **options)
        made = make(data, **options)
        return torch.empty(made.shape, dtype=made.dtype, device=device)

    return tensor


def _adam(self: Any, parameters: Any, lr: float = 1e-3, **_: Any) -> None:
    torch.optim.Optimizer.__init__(self, parameters, {"lr": lr, "weight_decay": 0.0, "amsgrad": False})


@torch.no_grad()
def _adam_step(self: Any, closure: Any = None) -> None:
    """States as DeepSpeedCPUAdam makes them: two in fp32, where the parameter lies."""
    for group in self.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None and not self.state[parameter]:
                self.state[parameter] = {
                    "step": 0,
                    "exp_avg": torch.zeros_like(parameter, dtype=torch.float32),
                    "exp_avg_sq": torch.zeros_like(parameter, dtype=torch.float32),
                }


@contextmanager
def stand_ins(on_gpu: bool, rank: int = 0) -> Iterator[None]:
    """While inside, DeepSpeed steps without peers and without values. `on_gpu`: on the device "gpu"."""
    from shardwise.training.engines.deepspeed import _import_deepspeed

    _import_deepspeed(torch.device("cpu"))
    import deepspeed.accelerator.real_accelerator as real
    import deepspeed.runtime.zero.partitioned_param_coordinator as coordinator
    import deepspeed.runtime.zero.stage3 as stage3
    import deepspeed.runtime.zero.stage_1_and_2 as stage12
    from deepspeed.comm import comm
    from deepspeed.ops.adam import DeepSpeedCPUAdam
    from deepspeed.runtime import utils as runtime_utils
    from deepspeed.utils import groups

    with ExitStack() as stack:
        replace = lambda owner, name, value: stack.enter_context(mock.patch.object(owner, name, value))  # noqa: E731
        variables = {"LOCAL_RANK": "0", "RANK": str(rank)}
        stack.enter_context(mock.patch.dict(os.environ, variables))
        replace(sys.modules["deepspeed.comm.torch"], "build_shm_op", lambda: None)  # waits for real peers
        replace(
            coordinator, "assert_ints_same_as_other_ranks", lambda *_, **__: None
        )  # a fake group answers 0
        for module in (stage12, stage3, runtime_utils):
            if hasattr(module, "mask_nan_or_inf_with_val_inplace"):
                replace(module, "mask_nan_or_inf_with_val_inplace", lambda *_, **__: None)
        for name, value in (("__init__", _adam), ("step", _adam_step), ("__del__", lambda _: None)):
            replace(DeepSpeedCPUAdam, name, value)  # C++ that reads memory
        for module in (groups, comm):  # process groups, remembered for a process's life; the fake one goes
            stack.enter_context(mock.patch.dict(vars(module)))
        if on_gpu:
            replace(torch, "tensor", _on_gpu(torch.tensor))
            before = real.ds_accelerator
            stack.callback(real.set_accelerator, before)
            real.set_accelerator(_accelerator())
        yield
