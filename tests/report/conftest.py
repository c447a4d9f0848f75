from pathlib import Path

import pytest
from made_runs import HOSTILE, fill

from shardwise.runs import RunFolder, create_run


@pytest.fixture
def done(tmp_path: Path) -> RunFolder:
    return fill(create_run(tmp_path / "runs", "tiny", "model: tiny\ndata: rows.jsonl\n", {"why": "test"}))


@pytest.fixture
def hostile(tmp_path: Path) -> RunFolder:
    recipe = f"model: tiny\ndata: rows.jsonl  # {HOSTILE}\n"
    return fill(create_run(tmp_path / "runs", "bad", recipe, {"note": HOSTILE}), hostile=HOSTILE)
