"""A rank under somebody else's launcher, which tells every end but 0 as a failure and starts it again."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from shardwise.launch.rank import ATTEMPT, RankEnd, end_path, log_path, stop_path
from shardwise.launch.wrapper import outcome
from shardwise.runs import RunFolder, create_run


def start(run: RunFolder, attempt: str) -> "subprocess.CompletedProcess[str]":
    environment = {**os.environ, "RANK": "0", "WORLD_SIZE": "1", ATTEMPT: attempt}
    return subprocess.run(
        [sys.executable, "-m", "shardwise.launch.rank", str(run.path)], env=environment, timeout=60, check=False,
        text=True, capture_output=True,
    )  # fmt: skip


def test_a_stop_that_comes_before_a_rank_can_listen_is_a_stop_and_not_tried_again(tmp_path: Path) -> None:
    run = create_run(tmp_path, "early", "model: m\ndata: d\n", {})
    run.logs_path.mkdir(exist_ok=True)
    stop_path(run).touch()
    assert start(run, "one").returncode == 75
    assert json.loads(end_path(run, 0).read_text())["exit_code"] == 75
    log_path(run, 0).unlink()
    assert start(run, "one").returncode == 75, "torchrun starts it again"
    assert not log_path(run, 0).exists(), "nothing was started"
    stop_path(run).unlink()  # the job as a whole is started again
    assert start(run, "two").returncode not in (0, 75), "that folder holds no run that could start"


def end(rank: int, code: int, echo: bool = False) -> RankEnd:
    return RankEnd("a", rank, 2, code, "host", f"code {code}", echo, time.time())


def test_the_outcome_of_ranks() -> None:
    assert outcome([end(0, 0), end(1, 0)], 0, True) == (0, "")
    assert outcome([end(0, 75), end(1, 75)], 1, True) == (75, "stopped on request, state saved")
    assert outcome([end(0, 75), end(1, 75)], 1, False)[1] == "stopped on request, before anything was saved"
    assert outcome([end(0, 75), end(1, 1)], 1, True) == (1, "rank 1 on host: code 1")
    assert outcome([end(0, 75), end(1, 2)], 1, False)[0] == 2, "the others were only ended with it"
    assert outcome([end(0, 1, echo=True), end(1, 1)], 1, True)[1].startswith("rank 1")
    assert outcome([end(0, 0)], 1, True)[0] == 1, "one has not told how it ended"
