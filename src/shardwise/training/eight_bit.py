"""bitsandbytes' 8-bit AdamW states, in checkpoints as the numbers they stand for.

A state is codes (bytes) and one scale per block of 256 elements. Blocks begin where a shard begins, so codes of two
ranks cannot be read by three; the numbers can: a checkpoint holds exp_avg and exp_avg_sq in fp32, as AdamW's own.
Reading it back into the same blocks gives the same codes, into other blocks a rounding as any step makes.
"""

from collections.abc import Mapping
from typing import Any

import torch

BLOCK = 256
SMALLEST = 4096  # elements of a whole tensor; smaller ones keep fp32 states, as in bitsandbytes
_ENTRIES = (("exp_avg", "state1", "qmap1", "absmax1"), ("exp_avg_sq", "state2", "qmap2", "absmax2"))


def is_eight_bit(state: Mapping[str, Any]) -> bool:
    return "state1" in state and state["state1"].dtype == torch.uint8


def numbers(state: Mapping[str, Any]) -> dict[str, Any]:
    """A parameter's 8-bit state as AdamW's, in host memory: exp_avg, exp_avg_sq (fp32), step."""
    found: dict[str, Any] = {"step": torch.tensor(float(state["step"]))}
    for name, codes, table, scales in _ENTRIES:
        found[name] = _dequantised(*(state[key].cpu() for key in (codes, table, scales)))
    return found


@torch.no_grad()
def take_numbers(state: dict[str, Any], values: Mapping[str, Any]) -> None:
    """Put AdamW's numbers into an existing 8-bit state, in place: its buffers may be paged."""
    state["step"] = int(values["step"])
    for name, codes, table, scales in _ENTRIES:
        found, scale = _quantised(values[name].float().cpu(), state[table].cpu())
        state[codes].copy_(found)
        state[scales].copy_(scale)


def _dequantised(codes: torch.Tensor, table: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    values = table[codes.flatten().int()]
    return (values * scales.repeat_interleave(BLOCK)[: values.numel()]).view(codes.shape)


def _quantised(values: torch.Tensor, table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes, scale per block). The inverse of `_dequantised` on its results.

    The table's ends are 1 and, signed, about -0.993: a block whose largest number is negative has its scale from
    that end, where the kernel put it.
    """
    flat = values.flatten()
    blocks = torch.nn.functional.pad(flat, (0, -len(flat) % BLOCK)).view(-1, BLOCK)
    scales = blocks.amax(dim=1).clamp(min=0) / table[-1]
    if table[0] < 0:
        scales = torch.maximum(scales, blocks.amin(dim=1).clamp(max=0) / table[0])
    scaled = blocks / scales.clamp(min=torch.finfo(torch.float32).tiny)[:, None]
    codes = torch.bucketize(scaled, (table[1:] + table[:-1]) / 2)
    return codes.to(torch.uint8).flatten()[: len(flat)].view(values.shape), scales
