"""What the loop asks of an engine.

The loop owns the mathematics of a step: it counts the step's trained tokens over all ranks and passes
`1 / tokens` as the scale of each micro-batch's summed loss. An engine must make the resulting gradient the *sum*
over ranks of scaled gradients (libraries that average over ranks are given the world size back), so that every
engine and every world size takes the same step.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from shardwise.training.batches import MicroBatch
from shardwise.training.model import LossModel


@dataclass(frozen=True)
class Ranks:
    """Who this process is; as torchrun sets it."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0


class Engine(Protocol):
    """One live training setup. `module` is the LossModel underneath every wrapper."""

    name: str
    ranks: Ranks
    device: torch.device
    module: LossModel

    def forward(self, batch: MicroBatch) -> torch.Tensor:
        """Summed loss of one micro-batch that lies on `device`; under `torch.no_grad()` for evaluation."""
        ...

    def backward(self, loss: torch.Tensor, scale: float, last: bool) -> None:
        """Add the gradient of `loss * scale`. `last` marks the step's final micro-batch: reduce over ranks."""
        ...

    def step(self, learning_rate: float, max_grad_norm: float | None) -> float:
        """Clip by the global norm, update, clear gradients. Returns the norm before clipping.

        A norm that is not finite is returned without any update; the caller stops the run.
        """
        ...

    def discard(self) -> None:
        """Forget the gradients of this step: its update is not made. Collective."""
        ...

    def trained_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name in transformers' or PEFT's model, whole fp32 or compute-dtype CPU tensor) of trained weights.

        Collective: all ranks iterate together; ranks other than 0 may get empty tensors. The most precise copy
        (the fp32 master where there is one) is given.
        """
        ...

    def state(self) -> dict[str, Any]:
        """Everything to continue from, as a torch.distributed.checkpoint state dict, keyed by parameter name:

        {"weights": {name: tensor}, "optimizer": {name: {"exp_avg": tensor, ...}}}, tensors whole or DTensor.
        Complete before the first step too: optimizer states are made if they do not exist yet.
        """
        ...

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take back what `state` gave, after torch.distributed.checkpoint has filled it."""
        ...

    def facts(self) -> dict[str, Any]:
        """What is really live: engine class, stage, dtypes, world size, quantisation. Compared with the recipe."""
        ...

    def tensors(self) -> Mapping[str, Sequence[torch.Tensor]]:
        """Long-lived tensors on this rank by memory term: weights, master_weights, gradients, optimizer, engine."""
        ...

    def offloaded(self) -> Sequence[torch.Tensor]:
        """Long-lived tensors that lie in host memory, or are swapped through it, where the device is a GPU."""
        ...

    def gathered(self) -> Any:
        """Context in which `module` can be called by this process alone (generation): weights whole."""
        ...

    def close(self) -> None: ...


def trained(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Trained parameters by name, each once (a tied matrix has one name)."""
    return [(name, p) for name, p in module.named_parameters() if p.requires_grad]
