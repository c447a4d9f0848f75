"""The demo on the real model: held-out loss falls, the estimate holds, the next commands work."""

import json
from pathlib import Path

import pytest

from shardwise.facts.experience import LEAST_SECONDS

pytestmark = pytest.mark.real_model


def test_demo_trains_a_real_model_and_keeps_its_estimate(smollm2: Path, tmp_path: Path, shardwise) -> None:
    done = shardwise("demo", "--steps", "10", cwd=tmp_path, OMP_NUM_THREADS="2")
    assert done.returncode == 0, done.stderr
    run = next((tmp_path / "shardwise-demo" / "runs").iterdir())
    summary = json.loads((run / "summary.json").read_text())
    assert summary["evaluation_after"] < 0.95 * summary["evaluation_before"]
    assert len(summary["samples"]) == 3
    assert all(s["before"] and s["after"] for s in summary["samples"])
    measured = summary["measured"]["peak_allocated_bytes"]
    assert summary["estimate"]["peak_allocated_bytes"] == pytest.approx(measured, rel=0.1)
    assert summary["measured"]["peak_resident_bytes"] > measured
    for word in ("plan", "memory at the peak", "measured", "before", "after", "next"):
        assert word in done.stdout
    dry = ("train", tmp_path / "shardwise-demo" / "recipe.yaml", "--dry-run")
    again = shardwise(*dry, cwd=tmp_path, OMP_NUM_THREADS="2")
    assert again.returncode == 0, again.stderr
    if (
        summary["measured"]["training_seconds"] >= LEAST_SECONDS
    ):  # the run taught the next estimate, which says so
        assert "1 finished run on this machine" in " ".join(again.stdout.split())


def test_demo_rows_come_from_disjoint_modules(tmp_path: Path) -> None:
    from shardwise.data.standard_library import standard_library_pairs, write_pairs

    train, validation = write_pairs(tmp_path, train_rows=100, validation_rows=10)
    rows = [[json.loads(line) for line in path.read_text().splitlines()] for path in (train, validation)]
    assert [len(r) for r in rows] == [100, 10]
    home = {}
    for pair in standard_library_pairs():
        home.setdefault(pair.answer, pair.module)  # the first of equal answers is the one that is taken
    modules = [{home[row["messages"][1]["content"]] for row in part} for part in rows]
    assert not modules[0] & modules[1]
