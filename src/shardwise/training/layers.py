"""Where a model's decoder layers are: what is sharded and compiled one by one."""

from torch import nn

from shardwise.training.model import LossModel


def decoder_layers(module: LossModel) -> list[nn.Module]:
    """The layers of the decoder stack, in order: its longest list of modules, under whatever name."""
    longest: list[nn.Module] = []
    for child in module.decoder().children():
        if isinstance(child, nn.ModuleList) and len(child) > len(longest):
            longest = list(child)
    return longest


def compile_layers(module: LossModel) -> None:
    """torch.compile of each layer by itself: one compilation serves all layers of one shape.

    Attention is left out of it (see attention.py), and the number of tokens is a symbol: rows differ in length.
    """
    for layer in decoder_layers(module):
        layer.compile(dynamic=True)
