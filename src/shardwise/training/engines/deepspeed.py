"""ZeRO stages 1, 2 and 3, with offload to host memory or NVMe, by DeepSpeed."""

import contextlib
import io
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from shardwise.errors import MissingDependencyError
from shardwise.recipe.schema import Recipe
from shardwise.training.batches import MicroBatch
from shardwise.training.engines.deepspeed_config import compare, deepspeed_config
from shardwise.training.engines.operators import preload
from shardwise.training.engines.protocol import Ranks, trained
from shardwise.training.hollow import materialise
from shardwise.training.layers import decoder_layers
from shardwise.training.model import LossModel
from shardwise.training.optimizers import build_optimizer, decay_groups


class DeepSpeedEngine:
    """DeepSpeed averages gradients over ranks and micro-batches; both are undone by the scale of the loss, so
    that the loop owns the denominator. The end of an accumulation window is set by `last`, not counted.
    """

    name = "deepspeed"

    def __init__(
        self,
        module: LossModel,
        recipe: Recipe,
        device: torch.device,
        ranks: Ranks,
        accumulation_steps: int,
        fill: Callable[[nn.Module], None] | None = None,
    ) -> None:
        """`fill`: the model is hollow, and this reads the weights of one part of it (stage 3 only)."""
        self.ranks, self.device, self.module = ranks, device, module
        self.section, self.recipe = recipe.engine.deepspeed, recipe
        self.named = trained(module.model)
        self.shapes = {name: param.shape for name, param in self.named}
        self.config = deepspeed_config(
            recipe,
            ranks.world_size,
            accumulation_steps,
            sum(p.numel() for _, p in self.named),
            sum(p.numel() for p in module.parameters()),
            max(p.numel() for p in module.parameters()),
            pin_memory=device.type == "cuda",
        )
        deepspeed = _import_deepspeed(device)
        preload()
        if self.section.zero_stage == 3 and module.chunked:
            # The loss reads the head's weight without calling the head, so ZeRO-3 must be told.
            head = module.causal_lm.get_output_embeddings()
            deepspeed.zero.register_external_parameter(module, head.weight)
        optimizer = _optimizer(recipe, self.named)  # decay goes by shapes, which stage 3 takes away
        with _keeping_buffers(module, device), contextlib.redirect_stdout(io.StringIO()):
            _join(deepspeed)
            if fill is not None:
                self._split_while_loading(fill)
            self.engine, self.zero, _, _ = deepspeed.initialize(
                model=module, optimizer=optimizer, config=self.config
            )
        compare(self.config, self.engine._config)

    def _split_while_loading(self, fill: Callable[[nn.Module], None]) -> None:
        """Read the weights layer by layer and keep this rank's part of each: one layer at a time is whole."""
        import deepspeed

        for part in (*decoder_layers(self.module), self.module):
            materialise(part)
            fill(part)
            split = [p for p in self.module.parameters() if hasattr(p, "ds_id")]
            if split:
                split[0].convert_to_zero_parameters([p for p in part.parameters() if not hasattr(p, "ds_id")])
                continue
            deepspeed.zero.Init(
                module=part,
                config_dict_or_path=self.config,
                dtype=self.named[0][1].dtype,
                remote_device=None
                if self.section.offload_parameters == "none"
                else self.section.offload_parameters,
                pin_memory=self.device.type == "cuda",
            )

    @property
    def _offloads(self) -> bool:
        return self.section.offload_optimizer != "none"

    def forward(self, batch: MicroBatch) -> torch.Tensor:
        loss: torch.Tensor = self.engine(batch)
        return loss

    def backward(self, loss: torch.Tensor, scale: float, last: bool) -> None:
        self.engine.set_gradient_accumulation_boundary(last)
        self.engine.backward(loss * (scale * self.ranks.world_size), scale_wrt_gas=False)

    def step(self, learning_rate: float, max_grad_norm: float | None) -> float:
        assert (max_grad_norm or 0.0) == self.config["gradient_clipping"]
        for group in self.zero.param_groups:
            group["lr"] = learning_rate
        self.engine.step()
        norm = self.engine.get_global_grad_norm()
        return float(norm) if norm is not None else float("nan")

    def discard(self) -> None:
        """DeepSpeed clears every buffer of its gradients in one place: where it has found an overflow."""
        zero = self.zero

        def found(*_: Any, **__: Any) -> bool:
            zero.overflow = True
            return True

        look = "_overflow_check_and_loss_scale_update" if self.section.zero_stage == 3 else "check_overflow"
        setattr(zero, look, found)
        checks, zero.check_grad_overflow = getattr(zero, "check_grad_overflow", None), True
        try:
            self.engine.set_gradient_accumulation_boundary(True)
            self.engine.step()
        finally:
            delattr(zero, look)
            zero.check_grad_overflow = checks

    def trained_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, param in self.named:
            whole = self._get(param, None)
            yield name, whole.float().cpu() if self.ranks.rank == 0 else whole.new_empty(0)

    def state(self) -> dict[str, Any]:
        """Whole tensors are gathered one at a time; each rank keeps its rows, as DTensors."""
        self._ensure_states()
        mesh = init_device_mesh("cpu", (self.ranks.world_size,))
        step = next(iter(self._base_states()))["step"] if "step" in self._state_keys() else None
        weights, optimizer = {}, {}
        for name, param in self.named:
            weights[name] = _rows(self._get(param, None), mesh)
            optimizer[name] = {k: _rows(self._get(param, k), mesh) for k in self._tensor_keys()}
            if step is not None:
                optimizer[name]["step"] = torch.as_tensor(float(step))
        return {"weights": weights, "optimizer": optimizer}

    @torch.no_grad()
    def load_state(self, state: Mapping[str, Any]) -> None:
        self._ensure_states()
        for name, param in self.named:
            self._set(param, _full(state["weights"][name]), None)
            for key in self._tensor_keys():
                if key in state["optimizer"].get(name, {}):
                    self._set(param, _full(state["optimizer"][name][key]), key)
        steps = [entries["step"] for entries in state["optimizer"].values() if "step" in entries]
        for entry in self._base_states() if steps else ():
            entry["step"] = (
                type(entry["step"])(float(steps[0]))
                if not torch.is_tensor(entry["step"])
                else (entry["step"].fill_(float(steps[0])))
            )
        self._masters_to_weights()

    def tensors(self) -> Mapping[str, Sequence[torch.Tensor]]:
        weights = [getattr(p, "ds_tensor", p) for p in self.module.parameters()]
        states = [v for entry in self.engine.basic_optimizer.state.values() for v in entry.values()]
        return {
            "weights": [*weights, *self.module.buffers()],
            "master_weights": self._flat_masters(),
            "gradients": [p.grad for p in self.module.parameters() if p.grad is not None]
            + [m.grad for m in self._flat_masters() if m.grad is not None],
            "optimizer": [v for v in states if isinstance(v, torch.Tensor)],
        }

    def offloaded(self) -> Sequence[torch.Tensor]:
        found: list[Any] = []
        if self._offloads:
            kept, zero = self.tensors(), self.zero
            found += [kept["master_weights"], [m.grad for m in self._flat_masters()], kept["optimizer"]]
            found += [getattr(zero, name, None) for name in _HOST_BUFFERS]
            found.append(getattr(getattr(zero, "optimizer_swapper", None), "swap_buffer_manager", None))
        if self.section.offload_parameters != "none":
            found += [[p.ds_tensor for p in self.module.parameters()]]
            swapper = getattr(self.zero.parameter_offload, "param_swapper", None) or getattr(
                self.zero, "param_swapper", None
            )
            found.append(swapper)
        return list(_tensors_in(found))

    def facts(self) -> dict[str, Any]:
        config = self.engine._config
        zero = config.zero_config
        return {
            "engine": "deepspeed",
            "engine_class": type(self.engine).__name__,
            "zero_class": type(self.zero).__name__,
            "world_size": dist.get_world_size(),
            "device": str(self.engine.device),
            "zero_stage": int(self.engine.zero_optimization_stage()),
            "offload_optimizer": _place(zero.offload_optimizer),
            "offload_parameters": _place(zero.offload_param),
            "gradient_clipping": self.engine.gradient_clipping(),
            "weights_dtype": str(self.named[0][1].dtype),
            "optimizer_dtype": str(self._flat_masters()[0].dtype),
            "reduce_dtype": str(self.engine.communication_data_type),
            "optimizer": type(self.engine.basic_optimizer).__name__,
        }

    @contextlib.contextmanager
    def gathered(self) -> Iterator[None]:
        """Collective at both ends. In between the hooks of stage 3 are off: a lone rank can run the model."""
        if self.section.zero_stage < 3:
            yield
            return
        import deepspeed

        offload = self.zero.parameter_offload
        with deepspeed.zero.GatheredParameters(list(self.module.parameters())):
            for param in self.module.parameters():
                param.ds_active_sub_modules.clear()
            for hook in (*offload.forward_hooks, *offload.backward_hooks):
                hook.remove()
            offload.forward_hooks, offload.backward_hooks = [], []
            try:
                yield
            finally:
                offload.setup_zero_stage3_hooks()

    def close(self) -> None:
        self.engine.destroy()

    # The rest is about the fp32 masters and optimizer states that ZeRO keeps flattened and split.

    def _flat_masters(self) -> list[torch.Tensor]:
        if self.section.zero_stage == 3:
            return list(self.zero.fp32_partitioned_groups_flat)
        return list(
            getattr(self.zero, "single_partition_of_fp32_groups", None)
            or self.zero.fp32_groups_flat_partition
        )

    def _base_states(self) -> list[dict[str, Any]]:
        return [self.engine.basic_optimizer.state[flat] for flat in self._flat_masters()]

    def _state_keys(self) -> set[str]:
        return {"adamw": {"step", "exp_avg", "exp_avg_sq"}, "sgd": {"momentum_buffer"}}[
            self.recipe.optimizer.name
        ]

    def _tensor_keys(self) -> list[str]:
        return sorted(self._state_keys() - {"step"})

    def _swapped(self, group: int) -> bool:
        return self.section.zero_stage == 3 and bool(self.zero._swappable_optimizer_subgroup(group))

    def _ensure_states(self) -> None:
        """Optimizer states exist from the first step on; a checkpoint may come before it."""
        base = self.engine.basic_optimizer
        for group, flat in enumerate(self._flat_masters()):
            if base.state.get(flat):
                continue
            if self._swapped(group):
                self.zero._optimizer_states_and_gradient_swap_in(group)
            entry: dict[str, Any] = {key: torch.zeros_like(flat) for key in self._tensor_keys()}
            if "step" in self._state_keys():
                entry["step"] = 0 if self._offloads else torch.tensor(0.0)
            base.state[flat] = entry
            if self._swapped(group):
                self.zero._optimizer_states_and_gradient_swap_out(group)
        if hasattr(self.zero, "_lazy_init_hp_params_optimizer_state"):
            self.zero._hp_optimizer_states_linked = False  # it was linked when there was nothing yet
            self.zero._lazy_init_hp_params_optimizer_state()

    def _get(self, param: nn.Parameter, key: str | None) -> torch.Tensor:
        """The whole fp32 master (key None) or optimizer state of one parameter. Collective."""
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        whole = safe_get_full_fp32_param(param) if key is None else safe_get_full_optimizer_state(param, key)
        assert whole is not None
        return torch.as_tensor(whole).detach()

    def _set(self, param: nn.Parameter, whole: torch.Tensor, key: str | None) -> None:
        from deepspeed import utils

        if self.section.zero_stage < 3:
            if key is None:
                utils.safe_set_full_fp32_param(param, whole)
            else:
                utils.safe_set_full_optimizer_state(param, whole, key)
            return
        size = param.ds_tensor.ds_numel  # of every rank's part; the last one is padded
        padded = torch.zeros(size * self.ranks.world_size, dtype=torch.float32)
        padded[: whole.numel()] = whole.flatten()
        mine = padded[size * self.ranks.rank : size * (self.ranks.rank + 1)]
        if key is None:
            utils.safe_set_local_fp32_param(param, mine)
        else:
            utils.safe_set_local_optimizer_state(param, mine, key)

    def _masters_to_weights(self) -> None:
        """What a step does after its update: bring the model's weights up to the masters."""
        zero = self.zero
        if self.section.zero_stage < 3:
            zero.update_lp_params()
            return
        zero._partition_all_parameters()
        for group in range(len(zero.fp16_groups)):
            if self._swapped(group):
                zero._optimizer_states_and_gradient_swap_in(group)
            zero._reassign_or_swap_out_partitioned_parameters(group)
            if self._swapped(group):
                zero._optimizer_states_and_gradient_swap_out(group)
        zero._post_step(set())


# Where ZeRO keeps gradients and updated weights of an update on the host: stages 1 and 2, then 3.
_HOST_BUFFERS = (
    "accumulated_grads_in_cpu",
    "temp_grad_buffer_for_cpu_offload",
    "param_buffer_of_bit16_for_cpu_offload_groups",
    "grad_partitions_flat_buffer",
    "lp_param_contiguous_pin_buffer",
)


def _tensors_in(value: Any, depth: int = 3) -> Iterator[torch.Tensor]:
    """Tensors in nested lists and dictionaries, and in the fields of DeepSpeed's buffer managers."""
    if isinstance(value, torch.Tensor):
        yield value
    elif depth and isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors_in(item, depth - 1)
    elif depth and isinstance(value, list | tuple):
        for item in value:
            yield from _tensors_in(item, depth - 1)
    elif depth and type(value).__module__.startswith("deepspeed."):
        yield from _tensors_in(vars(value), depth - 1)


def _join(deepspeed: Any) -> None:
    """DeepSpeed over the process group that is there.

    On processors it takes LOCAL_SIZE in two ways. Where that says at the start that all ranks are on one machine,
    67 MB of shared memory per rank are made for a collective of inference and never removed: they outlive the
    process. Where it is missing later, numactl is started for every bucket of gradients, to count processors.
    """
    ranks_here = os.environ.pop("LOCAL_SIZE", None) or os.environ.get("LOCAL_WORLD_SIZE", "1")
    deepspeed.init_distributed(verbose=False)
    os.environ["LOCAL_SIZE"] = ranks_here


def _import_deepspeed(device: torch.device) -> Any:
    os.environ.setdefault("DS_ACCELERATOR", device.type)  # also on a machine with GPUs that trains on its CPU
    for old_name in ("reduce_scatter_tensor", "all_gather_into_tensor"):  # DeepSpeed's to rename, per step
        warnings.filterwarnings("ignore", message=f".*{old_name}.*deprecated.*")
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    try:
        import deepspeed
    except ImportError:
        raise MissingDependencyError(
            "engine: deepspeed needs the package of that name",
            "it is not installed",
            "pip install 'shardwise[deepspeed]'",
        ) from None
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    return deepspeed


def _optimizer(recipe: Recipe, named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    section = recipe.optimizer
    assert section.learning_rate != "auto"
    if recipe.engine.deepspeed.offload_optimizer == "none" or section.name == "sgd":
        return build_optimizer(section, named, section.learning_rate)
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    optimizer: torch.optim.Optimizer = DeepSpeedCPUAdam(
        decay_groups(section, named),
        lr=section.learning_rate,
        betas=section.betas,
        eps=section.eps,
        adamw_mode=True,
        fp32_optimizer_states=True,
    )
    return optimizer


@contextlib.contextmanager
def _keeping_buffers(module: nn.Module, device: torch.device) -> Iterator[None]:
    """DeepSpeed casts the whole module to bf16, rotary frequencies included; they lose positions by that."""
    kept = [
        (owner, name, b) for owner in module.modules() for name, b in owner._buffers.items() if b is not None
    ]
    yield
    for owner, name, buffer in kept:
        owner._buffers[name] = buffer.to(device)


def _rows(whole: torch.Tensor, mesh: Any) -> DTensor:
    """This rank's rows of a whole tensor, as torch.distributed.checkpoint wants a split tensor."""
    rank, size = mesh.get_rank(), mesh.size()
    whole = whole.detach().cpu()
    parts = whole.chunk(size, dim=0)
    mine = parts[rank].clone() if rank < len(parts) else whole.new_empty(0, *whole.shape[1:])
    return DTensor.from_local(
        mine, mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride()
    )


def _full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _place(offload: Any) -> str:
    return "none" if offload is None else str(getattr(offload.device, "value", offload.device))
