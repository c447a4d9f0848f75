"""HSDP on four ranks: shards inside a replica, copies between replicas, the same model as one process trains."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from shardwise.launch import start


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    root = tmp_path_factory.mktemp("hybrid")
    command = [sys.executable, str(Path(__file__).with_name("hybrid_ranks.py")), str(root)]
    outcome = start(command, 4, root / "logs", {"OMP_NUM_THREADS": "1"})
    assert outcome.failure is None, outcome.failure.tail
    report: dict[str, Any] = json.loads((root / "found.json").read_text())
    return report


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_two_replicas_of_two_shards_follow_single(name: str, found: dict[str, Any]) -> None:
    one = found[name]
    assert one["facts"]["mesh"] == [2, 2] and one["facts"]["world_size"] == 4
    assert one["loss"] <= 1e-5 and one["norm"] <= 1e-4 and one["weights"] <= 1e-4
    assert one["reloaded"] <= 1e-7 and one["resumed"] <= 1e-6
