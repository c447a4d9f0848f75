"""torch.compile of a model's layers, one region per layer: one compilation serves all layers of one shape.

The number of tokens is a symbol, and attention is left out (see attention.py): a layer is compiled twice, for
training and for evaluation, however rows are packed.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from shardwise.training.layers import decoder_layers
from shardwise.training.model import LossModel

BACKEND = "inductor"


def compile_layers(module: LossModel) -> None:
    """Compile every decoder layer where it is called. After kernels are in and checkpointing is switched on."""
    compiled: dict[Any, Any] = {}
    for layer in decoder_layers(module):
        if getattr(layer, "gradient_checkpointing", False):
            layer._gradient_checkpointing_func = _inside(layer._gradient_checkpointing_func, compiled)
        else:
            layer.compile(dynamic=True, backend=BACKEND)


def _inside(checkpoint: Callable[..., Any], compiled: dict[Any, Any]) -> Callable[..., Any]:
    """A checkpoint function whose recomputed part is compiled. Around it, torch would run the layer uncompiled:
    a checkpoint cannot lie in a region that attention breaks in two.
    """

    def run(function: Any, *args: Any) -> Any:
        forward = function.func  # transformers hands over partial(forward of the layer's class, layer, ...)
        if forward not in compiled:
            compiled[forward] = torch.compile(forward, dynamic=True, backend=BACKEND)
        return checkpoint(partial(compiled[forward], *function.args, **function.keywords), *args)

    return run
