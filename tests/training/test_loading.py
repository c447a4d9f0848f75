"""Host memory while ranks load: with FSDP2 a node holds about one copy of the weights, not one per rank."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "load_memory.py"


@pytest.mark.skipif(sys.platform != "linux", reason="own memory is read from /proc")
def test_two_ranks_of_fsdp2_hold_one_copy_while_loading(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    sizes = ["--layers", "8", "--hidden", "512", "--only", "fsdp2"]
    run = subprocess.run(
        [sys.executable, "-W", "ignore", str(BENCHMARK), *sizes, "--out", str(out)],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-2000:]
    found = json.loads(out.read_text())
    size, ranks = found["model_bytes"], found["engines"]["fsdp2"]
    assert len(ranks) == 2 and size > 100 * 2**20
    # Each rank ends with half of the weights; whole copies on the way would make it three in all.
    assert all(rank["held_own_bytes"] > 0.45 * size for rank in ranks)
    assert sum(rank["peak_own_bytes"] for rank in ranks) < 1.8 * size
