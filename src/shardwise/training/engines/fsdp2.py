"""Weights, gradients and optimizer states split over the ranks, by torch's FSDP2 (`fully_shard`)."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from shardwise.recipe.schema import Recipe
from shardwise.training.batches import MicroBatch
from shardwise.training.engines.protocol import Ranks, trained
from shardwise.training.hollow import in_fp32, materialise
from shardwise.training.layers import decoder_layers
from shardwise.training.model import DTYPES, LossModel
from shardwise.training.optimizers import Updater
from shardwise.training.shards import Shards


class Fsdp2Engine:
    """One group per decoder layer, one for the rest, where tied embeddings lie: they stay one tensor.

    Trained weights are fp32 shards, which the optimizer updates directly (they are the masters); the forward
    pass gathers them in compute dtype. Frozen weights keep their own dtype and are never cast. Gradients are
    reduced in fp32 after every micro-batch: summing them unreduced would hold whole gradients.
    """

    name = "fsdp2"

    def __init__(
        self, module: LossModel, recipe: Recipe, device: torch.device, ranks: Ranks, accumulate: bool
    ) -> None:
        self.ranks, self.device, self.module = ranks, device, module
        self.section = recipe.engine.fsdp2
        assert recipe.training.precision != "auto" and recipe.optimizer.learning_rate != "auto"
        self.compute_dtype = DTYPES[recipe.training.precision]
        if recipe.optimizer.master_weights:
            for _, param in trained(module):
                param.data = in_fp32(param.data)
        self.mesh = _mesh(device, ranks.world_size, self.section.dp_replicate)
        self.shard_mesh = self.mesh["dp_shard"] if self.mesh.ndim == 2 else self.mesh
        options: dict[str, Any] = {
            "mesh": self.mesh,
            "mp_policy": MixedPrecisionPolicy(
                param_dtype=self.compute_dtype,
                reduce_dtype=torch.float32,
                output_dtype=None,
                cast_forward_inputs=False,
            ),
            "offload_policy": CPUOffloadPolicy(pin_memory=device.type == "cuda")
            if self.section.cpu_offload
            else OffloadPolicy(),
        }
        for layer in decoder_layers(module):
            materialise(layer)
            fully_shard(layer, reshard_after_forward=self.section.reshard_after_forward, **options)
        materialise(module)
        # The root's weights are used first and last in a step: freeing them in between only costs a gather.
        fully_shard(module, reshard_after_forward=False, **options)
        _place_buffers(module, device)
        # Whoever is called first becomes the root, and generation calls an inner module.
        self._root._get_fsdp_state()._lazy_init()
        self.named = trained(module.model)
        with torch.no_grad():
            self.shards = [_local(param) for _, param in self.named]
        self.updater = Updater(
            [(name, shard) for (name, _), shard in zip(self.named, self.shards, strict=True)],
            recipe.optimizer,
            recipe.optimizer.learning_rate,
            accumulate=False,
            shards=Shards(
                self.shard_mesh.get_group(), device, {name: tuple(p.shape) for name, p in self.named}
            ),
            compute_dtype=self.compute_dtype,
        )

    def forward(self, batch: MicroBatch) -> torch.Tensor:
        loss: torch.Tensor = self.module(batch)
        if not torch.is_grad_enabled():
            for group in self._groups():  # no backward pass will do it, and the next update would not be seen
                group.reshard()
        return loss

    def backward(self, loss: torch.Tensor, scale: float, last: bool) -> None:
        self._root.set_requires_all_reduce(last)  # between replicas, with dp_replicate > 1
        (
            loss * (scale * self.ranks.world_size)
        ).backward()  # FSDP2 averages over ranks; the loop wants the sum

    @property
    def _root(self) -> FSDPModule:
        return self.module  # fully_shard made it one, in place

    def _groups(self) -> list[FSDPModule]:
        return [m for m in self.module.modules() if isinstance(m, FSDPModule)]

    def step(self, learning_rate: float, max_grad_norm: float | None) -> float:
        for (_, param), shard in zip(self.named, self.shards, strict=True):
            grad = param.grad
            shard.grad = None if grad is None else _local(grad)
            param.grad = None
        return self.updater.step(learning_rate, max_grad_norm)

    def discard(self) -> None:
        for _, param in self.named:
            param.grad = None
        self.updater.zero()

    @torch.no_grad()
    def trained_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, param in self.named:
            whole = _whole(param, self.device)
            yield name, whole.cpu() if self.ranks.rank == 0 else whole.new_empty(0)

    @torch.no_grad()
    def state(self) -> dict[str, Any]:
        weights = {name: param.detach() for name, param in self.named}
        states = self.updater.optimizer_state()
        optimizer = {
            name: {key: _like(key, value, param) for key, value in states[name].items()}
            for name, param in self.named
        }
        return {"weights": weights, "optimizer": optimizer}

    @torch.no_grad()
    def load_state(self, state: Mapping[str, Any]) -> None:
        for (name, _), shard in zip(self.named, self.shards, strict=True):
            shard.copy_(_local(state["weights"][name]))
        self.updater.load_optimizer_state(
            {
                name: {key: _local(value) for key, value in entries.items()}
                for name, entries in state["optimizer"].items()
            }
        )

    def tensors(self) -> Mapping[str, Sequence[torch.Tensor]]:
        kept = {**self.updater.tensors(), "weights": [], "master_weights": []}
        with torch.no_grad():
            for param in self.module.parameters():
                # fp32 shards under bf16 compute are the masters; bf16 copies exist only while gathered
                is_master = param.requires_grad and param.dtype != self.compute_dtype
                kept["master_weights" if is_master else "weights"].append(_local(param))
                if param.grad is not None:
                    kept["gradients"].append(_local(param.grad))
        kept["weights"] += list(self.module.buffers())
        return kept

    def offloaded(self) -> Sequence[torch.Tensor]:
        if not self.section.cpu_offload:
            return ()
        kept = self.tensors()
        return [*(_local(p.data) for p in self.module.parameters()), *kept["gradients"], *kept["optimizer"]]

    def facts(self) -> dict[str, Any]:
        frozen = [p for p in self.module.parameters() if not p.requires_grad]
        return {
            "engine": "fsdp2",
            "engine_class": type(self.module).__name__,
            "world_size": dist.get_world_size(),
            "device": str(self.device),
            "mesh": list(self.mesh.mesh.shape),
            "groups": len(self._groups()),
            "reshard_after_forward": self.section.reshard_after_forward,
            "cpu_offload": all(s.device.type == "cpu" for s in self.shards) and self.section.cpu_offload,
            "sharded": all(isinstance(p, DTensor) for p in self.module.parameters()),
            "weights_dtype": str(frozen[0].dtype if frozen else self.named[0][1].dtype),
            "optimizer_dtype": str(self.shards[0].dtype),
            "reduce_dtype": str(torch.float32),
            "optimizer": type(self.updater.optimizers[0]).__name__,
        }

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Collective at both ends: every rank holds the whole model in between."""
        groups = self._groups()
        for group in groups:
            group.set_reshard_after_forward(False, recurse=False)
            group.unshard()
        try:
            yield
        finally:
            for group in groups:
                keep = group is self._root
                group.set_reshard_after_forward(
                    not keep and self.section.reshard_after_forward, recurse=False
                )
                group.reshard()
            dist.barrier()

    def close(self) -> None:
        pass


def _mesh(device: torch.device, world_size: int, dp_replicate: int) -> DeviceMesh:
    """(dp_shard,), or (dp_replicate, dp_shard) for HSDP: shards inside a group, copies between groups."""
    if dp_replicate == 1:
        return init_device_mesh(device.type, (world_size,), mesh_dim_names=("dp_shard",))
    shape = (dp_replicate, world_size // dp_replicate)
    return init_device_mesh(device.type, shape, mesh_dim_names=("dp_replicate", "dp_shard"))


def _place_buffers(module: nn.Module, device: torch.device) -> None:
    """Buffers are not sharded and go where the computation is, also when weights are offloaded."""
    for owner in module.modules():
        for name, buffer in owner._buffers.items():
            if buffer is not None:
                owner._buffers[name] = buffer.to(device)


def _local(tensor: Any) -> Any:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _whole(param: torch.Tensor, device: torch.device) -> torch.Tensor:
    """All shards together; gathered on `device`, where the ranks' links are."""
    if not isinstance(param, DTensor):
        return param.detach()
    if param.device.type != device.type:
        param = DTensor.from_local(
            param.to_local().to(device),
            param.device_mesh,
            param.placements,
            shape=param.shape,
            stride=param.stride(),
        )
    whole: torch.Tensor = param.detach().full_tensor()
    return whole


def _like(key: str, value: Any, param: torch.Tensor) -> Any:
    """An optimizer state of a shard as a DTensor whose rows are split like its parameter's.

    Step counters, and what a rule averages over a matrix's rows, are the same on every rank and pass through.
    """
    if not isinstance(value, torch.Tensor) or not isinstance(param, DTensor) or value.dim() == 0:
        return value
    if key == "col_var" and value.dim() == 2:
        return value
    assert all(not isinstance(p, Shard) or p.dim == 0 for p in param.placements)
    shape = torch.Size((param.shape[0], *value.shape[1:]))
    whole = TensorMeta(shape, torch.empty(shape, device="meta").stride(), value.dtype)
    # DTensor.from_local would move states that lie in host memory to the mesh's device.
    return DTensor(value, DTensorSpec(param.device_mesh, param.placements, whole), requires_grad=False)
