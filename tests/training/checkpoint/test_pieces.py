"""A tensor cut one way is put together another way, element for element."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from shardwise.errors import CheckpointError
from shardwise.training.checkpoint.pieces import Box, Reader, flatten, share, unflatten


def cut(rows: int, parts: int) -> list[tuple[int, int]]:
    """(first, count) of torch's chunks; the last ones may be empty."""
    size = -(-rows // parts)
    return [(min(i * size, rows), max(0, min(size, rows - i * size))) for i in range(parts)]


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.integers(1, 9), columns=st.integers(1, 4), old=st.integers(1, 5), new=st.integers(1, 5))
def test_rows_cut_for_some_ranks_are_read_by_others(
    rows: int, columns: int, old: int, new: int, tmp_path: Path
) -> None:
    whole = torch.arange(rows * columns, dtype=torch.float32).view(rows, columns)
    pieces = []
    for rank, (first, count) in enumerate(cut(rows, old)):
        if count:
            save_file(
                {"weights|w": whole[first : first + count].clone()}, tmp_path / f"rank-{rank}.safetensors"
            )
            pieces.append(
                {"file": f"rank-{rank}.safetensors", "offset": [first, 0], "shape": [count, columns]}
            )
    index = {
        "tensors": {"weights|w": {"shape": [rows, columns], "dtype": "float32", "pieces": pieces}},
        "values": {},
    }
    reader = Reader(tmp_path, json.loads(json.dumps(index)))
    assert torch.equal(reader.whole("weights|w"), whole)
    for first, count in cut(rows, new):
        wanted = Box((first, 0), (count, columns))
        got = torch.full((count, columns), -1.0)
        for piece in pieces:
            box = Box(tuple(piece["offset"]), tuple(piece["shape"]))
            common = box.overlap(wanted)
            if common:
                got[common.within(wanted)] = reader._slice(piece["file"], "weights|w", common.within(box))
        assert torch.equal(got, whole[first : first + count])


def test_a_hole_or_another_shape_is_an_error_with_the_parameters_name(tmp_path: Path) -> None:
    save_file({"optimizer|a.b|exp_avg": torch.ones(2, 3)}, tmp_path / "rank-0.safetensors")
    piece = {"file": "rank-0.safetensors", "offset": [0, 0], "shape": [2, 3]}
    entry = {"shape": [4, 3], "dtype": "float32", "pieces": [piece]}
    reader = Reader(tmp_path, {"tensors": {"optimizer|a.b|exp_avg": entry}, "values": {}})
    with pytest.raises(CheckpointError, match=r"exp_avg of a\.b is not whole"):
        reader.whole("optimizer|a.b|exp_avg")
    with pytest.raises(CheckpointError, match="has shape"):
        reader.fill("optimizer|a.b|exp_avg", torch.empty(2, 3))


def test_whole_tensors_are_dealt_out_over_ranks_once_each() -> None:
    state = {
        "weights": {f"layer.{i}.w": torch.ones(8, 8) for i in range(6)},
        "optimizer": {f"layer.{i}.w": {"exp_avg": torch.ones(8, 8), "step": 3} for i in range(6)},
    }
    flat = flatten(state)
    shares = [share(flat, rank, 4) for rank in range(4)]
    keys = [key for mine in shares for key in mine]
    assert sorted(keys) == sorted(k for k, v in flat.items() if isinstance(v, torch.Tensor))
    sizes = [sum(t.numel() for _, t in mine.values()) for mine in shares]
    assert max(sizes) == min(sizes) == 192
    assert unflatten(flat)["optimizer"]["layer.0.w"]["step"] == 3
