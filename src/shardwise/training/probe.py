"""Is bf16 faster than fp32 on this processor? `python -m shardwise.training.probe` prints the rates as JSON.

Under a second of measuring, products in turns, so that other work on the machine slows both alike.
"""

import json
import platform
import time
from dataclasses import asdict
from datetime import date
from importlib.metadata import version

import torch

from shardwise.facts.precision import MatrixRates
from shardwise.training.calibrate import bandwidth

ROWS, INPUTS, OUTPUTS = 512, 576, 1536
SECONDS, BANDWIDTH_SECONDS = 0.4, 0.2


def measure() -> MatrixRates:
    """Best rate of each dtype over forward and input-gradient products of one layer."""
    began = time.perf_counter()
    best = dict.fromkeys((torch.float32, torch.bfloat16), float("inf"))
    tensors = {
        dtype: [torch.randn(s).to(dtype) for s in ((ROWS, INPUTS), (OUTPUTS, INPUTS), (ROWS, OUTPUTS))]
        for dtype in best
    }
    for x, weight, grad in tensors.values():
        _ = x @ weight.t(), grad @ weight
    while time.perf_counter() < began + SECONDS:
        for dtype, (x, weight, grad) in tensors.items():
            start = time.perf_counter()
            _ = x @ weight.t(), grad @ weight
            best[dtype] = min(best[dtype], time.perf_counter() - start)
    flops = 2 * 2.0 * ROWS * INPUTS * OUTPUTS
    streamed = bandwidth("cpu", BANDWIDTH_SECONDS)
    return MatrixRates(
        host=platform.node(),
        threads=torch.get_num_threads(),
        torch=version("torch"),
        fp32_flops_per_second=flops / best[torch.float32],
        bf16_flops_per_second=flops / best[torch.bfloat16],
        seconds=time.perf_counter() - began,
        measured=date.today().isoformat(),
        bandwidth_bytes_per_second=streamed,
    )


if __name__ == "__main__":
    print(json.dumps(asdict(measure())))
