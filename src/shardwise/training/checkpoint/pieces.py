"""Which part of which tensor this rank writes, and how any rank of any layout gets its part back.

A state is {"weights": {name: tensor}, "optimizer": {name: {entry: tensor or number}}}, keyed by parameter
name whatever the engine. A tensor on disk is a set of boxes (offset and shape) that together cover it once;
loading copies the overlap of each box with the box that is wanted, so the layouts of saving and loading need
have nothing in common.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from shardwise.errors import CheckpointError

JOIN = "|"  # parameter names have dots, so levels are joined by a character that names do not have


@dataclass(frozen=True)
class Box:
    """A part of a tensor: where it begins and how long it is, per dim."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def empty(self) -> bool:
        return any(n == 0 for n in self.shape)

    def overlap(self, other: "Box") -> "Box | None":
        start = tuple(map(max, self.offset, other.offset))
        end = tuple(
            min(a + n, b + m)
            for a, n, b, m in zip(self.offset, self.shape, other.offset, other.shape, strict=True)
        )
        shape = tuple(e - s for s, e in zip(start, end, strict=True))
        return Box(start, shape) if all(n > 0 for n in shape) else None

    def within(self, outer: "Box") -> tuple[slice, ...]:
        """Index of this box in a tensor that holds `outer`."""
        return tuple(
            slice(o - p, o - p + n) for o, n, p in zip(self.offset, self.shape, outer.offset, strict=True)
        )


def flatten(state: Mapping[str, Any]) -> dict[str, Any]:
    """{"weights|NAME": tensor, "optimizer|NAME|ENTRY": tensor or number}."""
    flat = {f"weights{JOIN}{name}": value for name, value in state["weights"].items()}
    for name, entries in state["optimizer"].items():
        flat.update({f"optimizer{JOIN}{name}{JOIN}{key}": value for key, value in entries.items()})
    return flat


def unflatten(flat: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of `flatten`."""
    state: dict[str, Any] = {"weights": {}, "optimizer": {}}
    for key, value in flat.items():
        kind, name, *entry = key.split(JOIN)
        if kind == "weights":
            state["weights"][name] = value
        else:
            state["optimizer"].setdefault(name, {})[entry[0]] = value
    return state


def share(flat: Mapping[str, Any], rank: int, world_size: int) -> dict[str, tuple[Box, torch.Tensor]]:
    """What `rank` writes: its own box of split tensors; tensors that are whole everywhere are dealt out.

    Over all ranks every element is written once: of copies (replicated dims of a mesh) only the first.
    """
    loads = [0] * world_size
    mine: dict[str, tuple[Box, torch.Tensor]] = {}
    for key, value in flat.items():
        if isinstance(value, DTensor):
            if _is_copy(value):
                continue
            box, local = box_of(value), value.to_local()
            if not box.empty:
                mine[key] = (box, local)
        elif isinstance(value, torch.Tensor):
            owner = loads.index(min(loads))
            loads[owner] += value.numel() * value.element_size() + 1
            if owner == rank:
                mine[key] = (box_of(value), value)
    return mine


def box_of(value: torch.Tensor) -> Box:
    """The part of a tensor that lies on this rank."""
    if isinstance(value, DTensor):
        shape, offset = compute_local_shape_and_global_offset(
            value.shape, value.device_mesh, value.placements
        )
        return Box(tuple(offset), tuple(shape))
    return Box((0,) * value.dim(), tuple(value.shape))


def _is_copy(value: DTensor) -> bool:
    coordinate = value.device_mesh.get_coordinate() or []
    return any(isinstance(p, Replicate) and c > 0 for p, c in zip(value.placements, coordinate, strict=True))


class Reader:
    """The tensors of one checkpoint folder, by box. Files are mapped, so only what is asked for is read."""

    def __init__(self, folder: Path, index: Mapping[str, Any]) -> None:
        self.folder = folder
        self.tensors: Mapping[str, Any] = index["tensors"]
        self.values: Mapping[str, Any] = index["values"]
        self._open: dict[str, Any] = {}

    def keys(self) -> set[str]:
        return set(self.tensors) | set(self.values)

    @torch.no_grad()
    def fill(self, key: str, target: torch.Tensor) -> None:
        """Copy the saved tensor's part into `target` (a whole tensor or a DTensor), in place.

        Raises CheckpointError when shapes differ or the file cannot be read.
        """
        entry = self.tensors[key]
        if tuple(entry["shape"]) != tuple(target.shape):
            raise CheckpointError(
                f"{_plain(key)} has shape {tuple(target.shape)} here, {tuple(entry['shape'])} in {self.folder}",
                "the checkpoint is of another model or method",
                "resume with the recipe it was written by",
            )
        wanted = box_of(target)
        local = target.to_local() if isinstance(target, DTensor) else target
        covered = 0
        for box, file in _pieces(entry):
            common = box.overlap(wanted)
            if common is None:
                continue
            part = self._slice(file, key, common.within(box))
            local[common.within(wanted)].copy_(part)
            covered += part.numel()
        if covered != local.numel():
            raise CheckpointError(
                f"{_plain(key)} is not whole in {self.folder}",
                f"{covered:,} of {local.numel():,} elements are there",
                "it was written by another program or is damaged; delete it to resume from an older one",
            )

    def whole(self, key: str) -> torch.Tensor:
        """The saved tensor, all of it."""
        entry = self.tensors[key]
        target = torch.empty(entry["shape"], dtype=getattr(torch, entry["dtype"]))
        self.fill(key, target)
        return target

    def _slice(self, file: str, key: str, index: tuple[slice, ...]) -> torch.Tensor:
        try:
            if file not in self._open:
                self._open[file] = safe_open(self.folder / Path(file).name, framework="pt")
            opened = self._open[file]
            part: torch.Tensor = opened.get_slice(key)[index] if index else opened.get_tensor(key)
            return part
        except (OSError, SafetensorError) as problem:
            raise CheckpointError(
                f"{self.folder / file} cannot be read",
                str(problem).splitlines()[0],
                "it is damaged; delete the checkpoint to resume from an older one",
            ) from None


def _pieces(entry: Mapping[str, Any]) -> Iterator[tuple[Box, str]]:
    for piece in entry["pieces"]:
        yield Box(tuple(piece["offset"]), tuple(piece["shape"])), piece["file"]


def index_of(shares: Sequence[tuple[str, Mapping[str, Any]]], flat: Mapping[str, Any]) -> dict[str, Any]:
    """index.json from every rank's (file, {key: {"offset", "shape"}}) and the state as one rank sees it."""
    tensors: dict[str, Any] = {
        key: {"shape": list(value.shape), "dtype": str(value.dtype).removeprefix("torch."), "pieces": []}
        for key, value in flat.items()
        if isinstance(value, torch.Tensor)
    }
    values = {key: value for key, value in flat.items() if not isinstance(value, torch.Tensor)}
    index = {"format": 1, "tensors": tensors, "values": values}
    add_pieces(index, shares)
    return index


def add_pieces(index: Mapping[str, Any], shares: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
    """Say in an index which file holds which box, as in `index_of`."""
    for file, boxes in shares:
        for key, box in boxes.items():
            index["tensors"][key]["pieces"].append({"file": file, **box})


def _plain(key: str) -> str:
    """A key for people: 'exp_avg of model.norm.weight'."""
    _, name, *entry = key.split(JOIN)
    return f"{entry[0]} of {name}" if entry else name


__all__ = ["Box", "Reader", "add_pieces", "box_of", "flatten", "index_of", "share", "unflatten"]
