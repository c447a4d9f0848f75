"""One process, one device, no wrapper: the reference that every other engine is compared with."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from shardwise.recipe.schema import Recipe
from shardwise.training.batches import MicroBatch
from shardwise.training.engines.protocol import Ranks, trained
from shardwise.training.model import LossModel
from shardwise.training.optimizers import Updater


class SingleEngine:
    name = "single"

    def __init__(self, module: LossModel, recipe: Recipe, device: torch.device, accumulate: bool) -> None:
        self.ranks = Ranks()
        self.device = device
        self.module = module.to(device)
        rate = recipe.optimizer.learning_rate
        assert rate != "auto"
        self.updater = Updater(trained(self.module.model), recipe.optimizer, rate, accumulate)

    def forward(self, batch: MicroBatch) -> torch.Tensor:
        loss: torch.Tensor = self.module(batch)
        return loss

    def backward(self, loss: torch.Tensor, scale: float, last: bool) -> None:
        (loss * scale).backward()

    def step(self, learning_rate: float, max_grad_norm: float | None) -> float:
        return self.updater.step(learning_rate, max_grad_norm)

    def discard(self) -> None:
        self.updater.zero()

    def trained_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, master in zip(self.updater.names, self.updater.masters, strict=True):
            yield name, master.detach().cpu()

    def state(self) -> dict[str, Any]:
        weights = dict(zip(self.updater.names, (m.detach() for m in self.updater.masters), strict=True))
        return {"weights": weights, "optimizer": self.updater.optimizer_state()}

    @torch.no_grad()
    def load_state(self, state: Mapping[str, Any]) -> None:
        for name, master, param in zip(
            self.updater.names, self.updater.masters, self.updater.params, strict=True
        ):
            master.copy_(state["weights"][name])
            param.copy_(master)
        self.updater.load_optimizer_state(state["optimizer"])

    def facts(self) -> dict[str, Any]:
        return {
            "engine": "single",
            "world_size": 1,
            "device": str(self.device),
            "weights_dtype": str(next(self.module.parameters()).dtype),
            "optimizer_dtype": str(self.updater.masters[0].dtype),
            "optimizer": type(self.updater.optimizers[0]).__name__,
        }

    def tensors(self) -> Mapping[str, Sequence[torch.Tensor]]:
        module = self.module
        return {"weights": [*module.parameters(), *module.buffers()], **self.updater.tensors()}

    def offloaded(self) -> Sequence[torch.Tensor]:
        return ()

    def gathered(self) -> Any:
        return nullcontext()

    def close(self) -> None:
        pass
