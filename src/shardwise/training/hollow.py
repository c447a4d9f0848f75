"""A model without its weights, and its weights read row by row into shards.

Loading whole and then sharding needs one copy of the model per rank in host memory. Here every parameter starts as
one zero that looks like a matrix (all strides 0, no memory), the engine gives memory to one layer at a time and
keeps its shard of that, and each rank then reads only its own rows of the safetensors files. Host memory of a node
stays near one copy of the model in all.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import PreTrainedModel

from shardwise.training.model import ModelFolder


def hollow_model(folder: ModelFolder) -> PreTrainedModel | None:
    """The model with buffers and without weights; None when its files cannot be read row by row.

    That is so when tensors are stored under other names or shapes than the model has them (fused experts, old
    checkpoints): transformers converts those while it loads the whole.
    """
    files = tensor_files(folder.path)
    model = folder.empty()
    names = {name: p.shape for name, p in model.named_parameters()}
    for name, shape in names.items():
        file = files.get(name)
        if file is None:
            return None
        with safe_open(file, framework="pt") as opened:
            if tuple(opened.get_slice(name).get_shape()) != tuple(shape):
                return None
    if not _restore_buffers(model):
        return None
    zeros: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, param in module._parameters.items():
            if param is None:
                continue
            if id(param) not in zeros:  # a tied matrix stays one
                data = torch.zeros((), dtype=param.dtype).expand(param.shape)
                zeros[id(param)] = nn.Parameter(data, requires_grad=param.requires_grad)
            module._parameters[name] = zeros[id(param)]
    return model


def is_hollow(tensor: torch.Tensor) -> bool:
    """One number that looks like many."""
    return tensor.numel() > 1 and not any(tensor.stride())


def materialise(module: nn.Module) -> None:
    """Give hollow parameters memory, not yet written: an engine needs it to cut its shard, one layer at a time."""
    for param in module.parameters():
        if is_hollow(param.data):
            param.data = torch.empty(param.shape, dtype=param.dtype)


def in_fp32(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor.float()`, which a hollow tensor survives without taking memory."""
    if not is_hollow(tensor):
        return tensor.float()
    return tensor.as_strided((), ()).float().expand(tensor.shape)


@torch.no_grad()
def fill(model: nn.Module, folder: ModelFolder, part: nn.Module | None = None) -> None:
    """Read this rank's rows of every weight that has a file; adapters have none and keep their values.

    `part`: only the weights of this module of `model`. What ZeRO-3 has taken away already is left alone.
    """
    files = tensor_files(folder.path)
    wanted = {id(p) for p in (part or model).parameters() if not hasattr(p, "ds_id")}
    for name, param in model.named_parameters():
        key = stored_name(name)
        if key not in files or id(param) not in wanted:
            continue
        local = param.to_local() if isinstance(param, DTensor) else param
        if local.numel() == 0:
            continue
        start, stop = 0, local.shape[0] if local.dim() else 0
        if isinstance(param, DTensor):
            _, offset = compute_local_shape_and_global_offset(
                param.shape, param.device_mesh, param.placements
            )
            start, stop = offset[0], offset[0] + local.shape[0]
        with safe_open(files[key], framework="pt") as opened:
            rows = opened.get_slice(key)[start:stop] if local.dim() else opened.get_tensor(key)
            local.copy_(rows.to(folder.dtype))  # to compute dtype first, as a whole load does


def stored_name(name: str) -> str:
    """A parameter's name in the model's files: without PEFT's wrapping."""
    return name.removeprefix("base_model.model.").replace(".base_layer.", ".")


def tensor_files(folder: Path) -> dict[str, Path]:
    """Tensor name -> the safetensors file that holds it."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        table: dict[str, str] = json.loads(index.read_text())["weight_map"]
        return {name: folder / file for name, file in table.items()}
    single = folder / "model.safetensors"
    if not single.is_file():
        return {}
    with safe_open(single, framework="pt") as opened:
        return dict.fromkeys(opened.keys(), single)


def _restore_buffers(model: PreTrainedModel) -> bool:
    """Make the buffers that a model computes for itself (rotary frequencies). False when one was not written."""
    owners: list[nn.Module] = []
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is None or buffer.device.type != "meta":
                continue
            if not buffer.is_floating_point():
                return False
            module._buffers[name] = torch.full(buffer.shape, float("nan"), dtype=buffer.dtype)
            owners.append(module)
    initialise: Any = model._init_weights
    for module in dict.fromkeys(owners):
        initialise(module)  # weights beside the buffers are on the meta device and take no notice
    return not any(torch.isnan(b).any() for b in model.buffers())
