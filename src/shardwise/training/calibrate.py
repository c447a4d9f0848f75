"""Measure what this machine's device reaches: `python -m shardwise.training.calibrate` prints it as JSON.

Rates that the time estimate otherwise takes from data sheets: matrix products, memory bandwidth, the time the host
needs to issue an operation, the disk of the current folder, and on GPUs the way to the host and to the next GPU. Less
than a minute.
"""

import json
import os
import platform
import tempfile
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path

import torch

_SECONDS = 1.5  # per measurement
_BLOCK, _MOST_BLOCKS = 2**23, 128  # of the disk's test file: 1 GiB at most
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
        "bandwidth_bytes_per_second": bandwidth(device),
        "op_seconds": _operation(device),
        **_disk(Path.cwd()),
        **_links(device),
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


def bandwidth(device: str, seconds: float = _SECONDS) -> float:
    """Bytes per second of an element-wise sum of tensors far larger than any cache."""
    count = 2**24 if device == "cpu" else 2**27
    x, y, out = (torch.ones(count, device=device) for _ in range(3))

    def add() -> None:
        torch.add(x, y, out=out)

    return 3 * 4 * count / _repeat(add, device, seconds)


def _operation(device: str) -> float:
    """Seconds to issue one operation on a tensor of one element, with autograd recording it."""
    x = torch.ones(1, device=device, requires_grad=True)

    def chain() -> None:
        y = x
        for _ in range(500):
            y = y * 1.5

    return _repeat(chain, device) / 500


def _disk(folder: Path) -> dict[str, float | None]:
    """Sequential rates of the disk below a folder, past the system's cache; None where they cannot be had."""
    block, blocks = os.urandom(_BLOCK), 0
    unknown = {"disk_write_bytes_per_second": None, "disk_read_bytes_per_second": None}
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".shardwise-disk-") as file:
            start = time.perf_counter()
            while blocks < _MOST_BLOCKS and time.perf_counter() - start < 2 * _SECONDS:
                file.write(block)
                blocks += 1
            file.flush()
            os.fsync(file.fileno())
            written = blocks * _BLOCK / (time.perf_counter() - start)
            if not hasattr(os, "posix_fadvise"):
                return {**unknown, "disk_write_bytes_per_second": written}
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            start, size = time.perf_counter(), 0
            os.lseek(file.fileno(), 0, os.SEEK_SET)
            while part := os.read(file.fileno(), _BLOCK):
                size += len(part)
            read = size / (time.perf_counter() - start)
    except OSError:  # not writable, or full
        return {**unknown}
    return {"disk_write_bytes_per_second": written, "disk_read_bytes_per_second": read}


def _links(device: str) -> dict[str, float | None]:
    """Bytes per second from pinned host memory to a GPU, and from one GPU to the next; None where there is none."""
    if device != "cuda":
        return {"host_bytes_per_second": None, "link_bytes_per_second": None}
    size = 2**28
    here = torch.empty(size, dtype=torch.uint8, device="cuda:0")
    host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    found: dict[str, float | None] = {
        "host_bytes_per_second": size / _repeat(lambda: _copy(here, host), device),
        "link_bytes_per_second": None,
    }
    if torch.cuda.device_count() > 1:
        there = torch.empty(size, dtype=torch.uint8, device="cuda:1")
        found["link_bytes_per_second"] = size / _repeat(lambda: _copy(there, here), device)
    return found


def _copy(to: torch.Tensor, source: torch.Tensor) -> None:
    to.copy_(source, non_blocking=True)


def _repeat(work: Callable[[], None], device: str, seconds: float = _SECONDS) -> float:
    """Median seconds of one call; other work on the machine disturbs single calls."""
    wait = torch.cuda.synchronize if device == "cuda" else torch.mps.synchronize if device == "mps" else None
    times: list[float] = []
    work()
    end = time.perf_counter() + seconds
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
