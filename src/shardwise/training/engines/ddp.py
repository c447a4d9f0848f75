"""Whole weights on every rank; gradients summed over ranks by torch's DistributedDataParallel."""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from shardwise.recipe.schema import Recipe
from shardwise.training.batches import MicroBatch
from shardwise.training.engines.protocol import Ranks, trained
from shardwise.training.model import LossModel
from shardwise.training.optimizers import Updater

BUCKET_MIB = 25  # DistributedDataParallel's own default, written out: gradients reduced at a time
# Renamed in torch 2.13; buffers are the same on all ranks and never change.
_SIGNATURE = inspect.signature(DistributedDataParallel.__init__).parameters
_BUFFERS = "forward_sync_buffers" if "forward_sync_buffers" in _SIGNATURE else "broadcast_buffers"
# With one number all gradients lie in one bucket until the forward of the wrapper, not called here, rebuilds them:
# nothing is reduced before the end of the backward pass, and then through an fp32 copy of everything.
_LISTED = "bucket_cap_mb_list" in _SIGNATURE  # since torch 2.13
_CAP: dict[str, Any] = {"bucket_cap_mb_list": [BUCKET_MIB]} if _LISTED else {"bucket_cap_mb": BUCKET_MIB}


class DdpEngine:
    """Gradients are summed over ranks in fp32, whatever the dtype of the weights.

    Bytes per trained parameter beyond `single`: none with fp32 weights, where gradients are views into the
    reducer's buckets; with bf16 weights the buckets' 2, and one bucket in fp32 while it is reduced. With more
    than one micro-batch per step the fp32 sums of `Updater` are what is reduced.
    """

    name = "ddp"

    def __init__(
        self, module: LossModel, recipe: Recipe, device: torch.device, ranks: Ranks, accumulate: bool
    ) -> None:
        self.ranks, self.device = ranks, device
        self.module = module.to(device)
        rate = recipe.optimizer.learning_rate
        assert rate != "auto"
        self.updater = Updater(trained(self.module.model), recipe.optimizer, rate, accumulate=False)
        # The reducer needs the gradients of the last micro-batch: sums in fp32 are kept by our own hooks.
        self.updater.accumulate = accumulate and self.updater.low
        self.last = True
        self.master_of = {id(p): m for p, m in zip(self.updater.params, self.updater.masters, strict=True)}
        if self.updater.accumulate:
            for param in self.updater.params:
                param.register_post_accumulate_grad_hook(self._keep)
        self.wrapped = DistributedDataParallel(
            self.module,
            device_ids=None,
            **_CAP,
            **{_BUFFERS: False},
            init_sync=False,  # every rank has read the same files and drawn the same adapters
            gradient_as_bucket_view=True,
            find_unused_parameters=False,
        )
        self.wrapped.register_comm_hook(None, self._reduce)

    def forward(self, batch: MicroBatch) -> torch.Tensor:
        # Not through the wrapper: its forward decides for or against a reduction, and here backward() does.
        loss: torch.Tensor = self.module(batch)
        return loss

    def backward(self, loss: torch.Tensor, scale: float, last: bool) -> None:
        self.last = last
        if last:
            if not _LISTED:
                self.wrapped.reducer._rebuild_buckets()  # once, from the second step on
            self.wrapped.reducer.prepare_for_backward([])
        (loss * scale).backward()

    def _keep(self, param: torch.Tensor) -> None:
        """Move a gradient of a micro-batch that is not reduced into its fp32 sum."""
        if self.last:
            return
        master, grad = self.master_of[id(param)], param.grad
        assert grad is not None
        master.grad = grad.float() if master.grad is None else master.grad.add_(grad)
        param.grad = None

    def _reduce(self, _: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Sum one bucket over ranks in fp32. Called by the reducer while the backward pass goes on."""
        flat = bucket.buffer()
        total = flat if flat.dtype == torch.float32 else flat.float()
        pieces: list[tuple[torch.Tensor, torch.Tensor]] = []
        if self.updater.accumulate:
            start = 0
            for param in bucket.parameters():
                master = self.master_of[id(param)]
                piece = total[start : start + param.numel()].view(param.shape)
                if master.grad is not None:
                    piece += master.grad
                pieces.append((master, piece))
                start += param.numel()
        future = dist.all_reduce(total, async_op=True).get_future()

        def done(_: torch.futures.Future[Any]) -> torch.Tensor:
            for master, piece in pieces:
                master.grad = piece
            return flat if total is flat else flat.copy_(total)

        return future.then(done)

    def step(self, learning_rate: float, max_grad_norm: float | None) -> float:
        return self.updater.step(learning_rate, max_grad_norm)

    def discard(self) -> None:
        self.updater.zero()

    def trained_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, master in zip(self.updater.names, self.updater.masters, strict=True):
            yield name, master.detach().cpu() if self.ranks.rank == 0 else master.new_empty(0)

    def state(self) -> dict[str, Any]:
        weights = dict(zip(self.updater.names, (m.detach() for m in self.updater.masters), strict=True))
        return {"weights": weights, "optimizer": self.updater.optimizer_state()}

    @torch.no_grad()
    def load_state(self, state: Mapping[str, Any]) -> None:
        updater = self.updater
        for name, master, param in zip(updater.names, updater.masters, updater.params, strict=True):
            master.copy_(state["weights"][name])
            param.copy_(master)
        updater.load_optimizer_state(state["optimizer"])

    def tensors(self) -> Mapping[str, Sequence[torch.Tensor]]:
        module = self.module
        return {"weights": [*module.parameters(), *module.buffers()], **self.updater.tensors()}

    def facts(self) -> dict[str, Any]:
        return {
            "engine": "ddp",
            "engine_class": type(self.wrapped).__name__,
            "world_size": dist.get_world_size(),
            "device": str(self.device),
            "weights_dtype": str(self.updater.params[0].dtype),
            "optimizer_dtype": str(self.updater.masters[0].dtype),
            "reduce_dtype": str(torch.float32),
            "optimizer": type(self.updater.optimizers[0]).__name__,
        }

    def offloaded(self) -> Sequence[torch.Tensor]:
        return ()

    def gathered(self) -> Any:
        return nullcontext()

    def close(self) -> None:
        pass
