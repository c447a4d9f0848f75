"""Measure what this machine's device reaches: `python -m shardwise.training.calibrate` prints it as JSON.

Three rates that the time estimate otherwise takes from data sheets: matrix products, memory bandwidth, and the
time the host needs to issue an operation. About twenty seconds.
"""

import json
import os
import platform
import time
from collections.abc import Callable
from datetime import date

import torch

_SECONDS = 1.5  # per measurement
# (rows, in, out) of the products: a small model's layer on a processor, a 7B model's on a GPU.
_SMALL = ((1024, 576, 1536), (1024, 1536, 576), (1024, 1024, 1024))
_LARGE = ((8192, 4096, 11008), (8192, 4096, 4096))


def measure() -> dict[str, object]:
    """Rates of the best device here, in the fields of facts.calibration.Calibration."""
    device = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    shapes = _SMALL if device == "cpu" else _LARGE
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    return {
        "host": platform.node(),
        "device": device,
        "threads": torch.get_num_threads(),
        "matrix_flops_per_second": {
            name: _matrix_rate(device, dtype, shapes)
            for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16))
        },
        "bandwidth_bytes_per_second": _bandwidth(device),
        "op_seconds": _operation(device),
        "busy": load,
        "measured": date.today().isoformat(),
    }


def _matrix_rate(device: str, dtype: torch.dtype, shapes: tuple[tuple[int, int, int], ...]) -> float:
    """FLOPs per second over forward and both backward products of each shape, one after the other."""
    flops = seconds = 0.0
    for rows, into, out in shapes:
        x = torch.randn(rows, into, device=device, dtype=dtype)
        weight = torch.randn(out, into, device=device, dtype=dtype)
        y = torch.randn(rows, out, device=device, dtype=dtype)

        def products(x: torch.Tensor = x, weight: torch.Tensor = weight, y: torch.Tensor = y) -> None:
            _ = x @ weight.t(), y @ weight, y.t() @ x

        seconds += _repeat(products, device)
        flops += 3 * 2.0 * rows * into * out
    return flops / seconds


def _bandwidth(device: str) -> float:
    """Bytes per second of an element-wise sum of tensors far larger than any cache."""
    count = 2**24 if device == "cpu" else 2**27
    x, y = torch.randn(count, device=device), torch.randn(count, device=device)
    out = torch.empty_like(x)

    def add() -> None:
        torch.add(x, y, out=out)

    return 3 * 4 * count / _repeat(add, device)


def _operation(device: str) -> float:
    """Seconds to issue one operation on a tensor of one element, with autograd recording it."""
    x = torch.ones(1, device=device, requires_grad=True)

    def chain() -> None:
        y = x
        for _ in range(500):
            y = y * 1.5

    return _repeat(chain, device) / 500


def _repeat(work: Callable[[], None], device: str) -> float:
    """Median seconds of one call; other work on the machine disturbs single calls."""
    wait = torch.cuda.synchronize if device == "cuda" else torch.mps.synchronize if device == "mps" else None
    times: list[float] = []
    work()
    end = time.perf_counter() + _SECONDS
    while time.perf_counter() < end or len(times) < 3:
        start = time.perf_counter()
        work()
        if wait is not None:
            wait()
        times.append(time.perf_counter() - start)
    times.sort()
    return times[len(times) // 2]


if __name__ == "__main__":
    print(json.dumps(measure()))
