"""Update rules over named parameters: decay groups, fp32 masters, clipping by the global norm.

Memory, bytes per trained parameter with AdamW: bf16 weights 2 + bf16 gradients 2 + fp32 masters 4 + states 8
= 16; fp32 weights 4 + gradients 4 + states 8 = 16. With more than one micro-batch per step, bf16 gradients
are summed in fp32 (4 instead of 2, plus the one bf16 gradient that is being added). The update runs bucket by
bucket, so that its temporaries are those of at most BUCKET_ELEMENTS elements (or the largest tensor).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from shardwise.errors import MissingDependencyError
from shardwise.recipe.schema import Optimizer as OptimizerSection
from shardwise.training import eight_bit
from shardwise.training.matrix_rules import Muon, ShardedAdafactor
from shardwise.training.shards import Shards

BUCKET_ELEMENTS = 2**26


def is_matrix(module: nn.Module) -> bool:
    """A linear layer that an adapter fits on, also GPT-2's transposed Conv1D and 4-bit layers."""
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def decays(name: str, shape: Sequence[int]) -> bool:
    """Weight decay acts on matrices and embeddings, never on norms and biases (all of one dimension)."""
    return len(shape) >= 2 and not name.endswith("bias")


def build_optimizer(
    section: OptimizerSection,
    named: Sequence[tuple[str, torch.Tensor]],
    learning_rate: float,
    compute_dtype: torch.dtype = torch.float32,
    shards: Shards | None = None,
) -> torch.optim.Optimizer:
    """One torch optimizer over `named` parameters, in two groups: with and without weight decay.

    Muon and 8-bit states are for some parameters only (`is_special`); the others get AdamW with fp32 states. A call
    holds parameters of one kind. `shards`: how they are split; None: they are whole.
    """
    groups = decay_groups(section, named)
    betas, eps = section.betas, section.eps
    special = all(is_special(section, n, _whole_shape(n, p, shards)) for n, p in named)
    if section.name == "sgd":
        return torch.optim.SGD(groups, lr=learning_rate, momentum=section.momentum, foreach=True)
    if section.name == "adafactor":
        if shards is not None:
            return ShardedAdafactor(groups, named, learning_rate, shards)
        return torch.optim.Adafactor(groups, lr=learning_rate)
    if section.name == "muon" and special:
        return Muon(named, learning_rate, section.weight_decay, section.momentum, compute_dtype, shards)
    if section.name in ("adamw", "muon") or not special:
        return _adamw(groups, learning_rate, section)
    try:
        import bitsandbytes as bnb
    except ImportError:
        raise MissingDependencyError(
            f"optimizer.name: {section.name} needs bitsandbytes",
            "the package is not installed",
            "pip install 'shardwise[qlora]'",
        ) from None
    kind = bnb.optim.PagedAdamW8bit if section.name.startswith("paged") else bnb.optim.AdamW8bit
    return kind(groups, lr=learning_rate, betas=betas, eps=eps, min_8bit_size=0)


def _adamw(
    groups: list[dict[str, Any]], learning_rate: float, section: OptimizerSection
) -> torch.optim.Optimizer:
    kind = "fused" if _on_cpu(groups) else "foreach"
    return torch.optim.AdamW(groups, lr=learning_rate, betas=section.betas, eps=section.eps, **{kind: True})


def _on_cpu(groups: Sequence[Mapping[str, Any]]) -> bool:
    """There one kernel takes a seventh of foreach's time and no temporaries: 0.06 s for 128 M elements, not 0.44."""
    return all(p.device.type == "cpu" for group in groups for p in group["params"])


def decay_groups(
    section: OptimizerSection, named: Sequence[tuple[str, torch.Tensor]]
) -> list[dict[str, Any]]:
    """torch's parameter groups: with weight decay and without; an empty group is left out."""
    groups: list[dict[str, Any]] = [
        {"params": [p for n, p in named if decays(n, p.shape)], "weight_decay": section.weight_decay},
        {"params": [p for n, p in named if not decays(n, p.shape)], "weight_decay": 0.0},
    ]
    return [g for g in groups if g["params"]]


def orthogonalises(name: str, shape: Sequence[int]) -> bool:
    """Muon is for matrices between hidden states; embeddings and output heads map to words and get AdamW."""
    return len(shape) == 2 and not any(part in name for part in ("embed", "lm_head", "wte", "wpe"))


def is_special(section: OptimizerSection, name: str, shape: Sequence[int]) -> bool:
    """Whether a parameter of this whole shape gets the rule that the recipe names, where AdamW has the others."""
    if section.name == "muon":
        return orthogonalises(name, shape)
    if section.name.endswith("8bit"):
        return torch.Size(shape).numel() >= eight_bit.SMALLEST
    return False


def _whole_shape(name: str, param: torch.Tensor, shards: Shards | None) -> Sequence[int]:
    return param.shape if shards is None else shards.shapes[name]


class Updater:
    """Owns masters and optimizer of parameters that are whole on this rank (single, DDP) or shards (FSDP2).

    `masters` False: bf16 weights are updated in place (2 + 2 + 2 + 2 bytes of states).
    `shards`: how they are split. `compute_dtype`: of the forward pass, where it is not the parameters'.
    """

    def __init__(
        self,
        named: Sequence[tuple[str, nn.Parameter]],
        section: OptimizerSection,
        learning_rate: float,
        accumulate: bool,
        shards: Shards | None = None,
        compute_dtype: torch.dtype | None = None,
    ) -> None:
        self.over_ranks = None if shards is None else shards.sum
        self.names = [name for name, _ in named]
        self.params = [p for _, p in named]
        low = section.master_weights and any(p.dtype != torch.float32 for p in self.params)
        self.masters = [p.detach().float() if low else p for p in self.params]
        self.low, self.accumulate = low, accumulate and low
        if self.accumulate:
            for param, master in zip(self.params, self.masters, strict=True):
                param.register_post_accumulate_grad_hook(_add_to(master))
        split = [is_special(section, n, _whole_shape(n, p, shards)) for n, p in named]
        self.buckets = [
            [kind[k] for k in bucket]
            for kind in ([i for i, m in enumerate(split) if m == which] for which in (False, True))
            for bucket in _buckets([self.params[i].numel() for i in kind])
        ]
        dtype = compute_dtype or next((p.dtype for p in self.params), torch.float32)
        self.optimizers = [
            build_optimizer(
                section, [(self.names[i], self.masters[i]) for i in bucket], learning_rate, dtype, shards
            )
            for bucket in self.buckets
        ]

    def gradients(self) -> list[torch.Tensor]:
        """This step's summed gradients, in the dtype they were summed in."""
        source = self.masters if self.accumulate else self.params
        return [p.grad for p in source if p.grad is not None]

    @torch.no_grad()
    def step(self, learning_rate: float, max_grad_norm: float | None) -> float:
        """Clip, update, clear. Returns the norm before clipping; not finite means nothing was updated."""
        norm = global_norm(self.gradients(), self.over_ranks)
        if not norm < float("inf"):
            self.zero()
            return norm
        factor = min(1.0, max_grad_norm / (norm + 1e-6)) if max_grad_norm is not None else 1.0
        for bucket, optimizer in zip(self.buckets, self.optimizers, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate
            masters = [self.masters[i] for i in bucket]
            if self.low:
                for i in bucket:
                    if not self.accumulate and self.params[i].grad is not None:
                        self.masters[i].grad = self.params[i].grad.float()
                        self.params[i].grad = None
            if factor < 1.0:
                torch._foreach_mul_([m.grad for m in masters if m.grad is not None], factor)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if self.low:
                torch._foreach_copy_([self.params[i] for i in bucket], masters)
        self.zero()
        return norm

    def zero(self) -> None:
        for p in (*self.params, *self.masters):
            p.grad = None

    def tensors(self) -> dict[str, list[torch.Tensor]]:
        """What this object keeps, by memory term."""
        own = {id(p) for p in self.params}
        return {
            "master_weights": [m for m in self.masters if id(m) not in own],
            "gradients": [p.grad for p in (*self.params, *self.masters) if p.grad is not None],
            "optimizer": [
                value
                for optimizer in self.optimizers
                for entries in optimizer.state.values()
                for value in entries.values()
                if isinstance(value, torch.Tensor)
            ],
        }

    @torch.no_grad()
    def initialise(self) -> None:
        """Make optimizer states that do not exist yet, by a step of length 0 on gradients of 0, not counted."""
        for bucket, optimizer in zip(self.buckets, self.optimizers, strict=True):
            if optimizer.state:
                continue
            before = [self.masters[i].grad for i in bucket]
            for i in bucket:
                self.masters[i].grad = torch.zeros_like(self.masters[i])
            rates = [group["lr"] for group in optimizer.param_groups]
            for group in optimizer.param_groups:
                group["lr"] = 0.0
            optimizer.step()
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate
            for state in optimizer.state.values():
                if "step" in state:
                    state["step"] = state["step"] * 0
            for i, grad in zip(bucket, before, strict=True):
                self.masters[i].grad = grad

    def optimizer_state(self) -> dict[str, dict[str, Any]]:
        """Parameter name -> its optimizer state (exp_avg, exp_avg_sq, step ...), made if there is none yet."""
        self.initialise()
        found = {}
        for bucket, optimizer in zip(self.buckets, self.optimizers, strict=True):
            for i in bucket:
                state = optimizer.state.get(self.masters[i], {})
                found[self.names[i]] = (
                    eight_bit.numbers(state) if eight_bit.is_eight_bit(state) else dict(state)
                )
        return found

    def load_optimizer_state(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Take back what `optimizer_state` gave."""
        self.initialise()
        for bucket, optimizer in zip(self.buckets, self.optimizers, strict=True):
            for i in bucket:
                values, kept = state.get(self.names[i]), optimizer.state.get(self.masters[i], {})
                if values and eight_bit.is_eight_bit(kept):
                    eight_bit.take_numbers(kept, values)
                elif values:
                    optimizer.state[self.masters[i]] = dict(values)


def global_norm(
    gradients: Sequence[torch.Tensor], over_ranks: Callable[[torch.Tensor], torch.Tensor] | None = None
) -> float:
    """Euclidean norm over all gradients together, summed in fp32; of all ranks' shards with `over_ranks`."""
    total = torch.zeros(())
    if gradients:
        norms = torch.stack([torch.linalg.vector_norm(g, dtype=torch.float32) for g in gradients])
        total = norms.square().sum()
    if over_ranks is not None:
        total = over_ranks(total)
    return float(total.sqrt())


def _add_to(master: torch.Tensor) -> Any:
    def hook(param: torch.Tensor) -> None:
        assert param.grad is not None
        master.grad = param.grad.float() if master.grad is None else master.grad.add_(param.grad)
        param.grad = None

    return hook


def _buckets(sizes: Sequence[int]) -> Iterator[list[int]]:
    bucket: list[int] = []
    filled = 0
    for i, size in enumerate(sizes):
        if bucket and filled + size > BUCKET_ELEMENTS:
            yield bucket
            bucket, filled = [], 0
        bucket.append(i)
        filled += size
    if bucket:
        yield bucket
