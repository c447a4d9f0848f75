"""A stand-in for DistributedDataParallel's reducer, which is C++ and reads gradients: what it holds, in Python.

From torch/csrc/distributed/c10d/reducer.cpp (2.13), with gradient_as_bucket_view: parameters fill buckets until one
holds `bucket_cap_mb` or more; a bucket is one buffer that lives from construction on; when a parameter's gradient is
complete it is copied into its part of the bucket, and `.grad` becomes a view of it; a full bucket goes to the
communication hook.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass
class Bucket:
    """As torch.distributed.GradBucket, as far as our communication hook asks."""

    flat: torch.Tensor
    members: Sequence[nn.Parameter]
    waiting: int = 0

    def buffer(self) -> torch.Tensor:
        return self.flat

    def parameters(self) -> Sequence[nn.Parameter]:
        return self.members


class Reducer:
    """Takes DistributedDataParallel's place in the engine; its own `reducer`."""

    def __init__(
        self, module: nn.Module, bucket_cap_mb: int = 25, bucket_cap_mb_list: Sequence[int] = (), **_: Any
    ) -> None:
        self.reducer = self
        self.active = False
        self.hook: Callable[[Any, Any], Any] = lambda *_: None
        self.bucket_of: dict[int, tuple[Bucket, torch.Tensor]] = {}
        cap, members, size = (*bucket_cap_mb_list, bucket_cap_mb)[0] * 2**20, list[nn.Parameter](), 0
        trained = [p for p in module.parameters() if p.requires_grad]
        for parameter in trained:
            members.append(parameter)
            size += parameter.nbytes
            if size >= cap:
                self._close(members)
                members, size = [], 0
        if members:
            self._close(members)
        for parameter in trained:
            parameter.register_post_accumulate_grad_hook(self._ready)

    def _close(self, members: list[nn.Parameter]) -> None:
        flat = torch.zeros(sum(p.numel() for p in members), dtype=members[0].dtype, device=members[0].device)
        bucket, start = Bucket(flat, members), 0
        for p in members:
            self.bucket_of[id(p)] = (bucket, flat[start : start + p.numel()].view(p.shape))
            start += p.numel()

    def register_comm_hook(self, state: Any, hook: Callable[[Any, Any], Any]) -> None:
        self.hook = hook

    def prepare_for_backward(self, _: Any) -> None:
        self.active = True
        for bucket, _view in self.bucket_of.values():
            bucket.waiting = len(bucket.members)

    @torch.no_grad()
    def _ready(self, parameter: nn.Parameter) -> None:
        if not self.active:
            return
        bucket, view = self.bucket_of[id(parameter)]
        assert parameter.grad is not None
        if parameter.grad.untyped_storage()._cdata != view.untyped_storage()._cdata:
            view.copy_(parameter.grad)
            parameter.grad = view
        bucket.waiting -= 1
        if bucket.waiting == 0:
            self.hook(None, bucket)
            self.active = any(other.waiting for other, _ in self.bucket_of.values())
