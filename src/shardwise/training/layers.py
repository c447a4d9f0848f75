"""Where a model's decoder layers are: what is sharded, compiled and checkpointed one by one."""

from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from shardwise.training.model import LossModel


def decoder_layers(module: "LossModel") -> list[nn.Module]:
    """The layers of the decoder stack, in order: its longest list of modules, under whatever name."""
    longest: list[nn.Module] = []
    for child in module.decoder().children():
        if isinstance(child, nn.ModuleList) and len(child) > len(longest):
            longest = list(child)
    return longest
