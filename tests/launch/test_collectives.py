"""Ranks in real collectives: one that fails or starves does not leave the other waiting (R02, R03)."""

import io
import sys
import textwrap
import time
from pathlib import Path

import pytest

from shardwise.launch import Outcome, start

pytest.importorskip("torch")

HEAD = """
import datetime, os, torch, torch.distributed as dist
dist.init_process_group("gloo", timeout=datetime.timedelta(minutes=10))
rank = dist.get_rank()
"""


def run(tmp_path: Path, body: str) -> tuple[Outcome, float]:
    began = time.monotonic()
    code = HEAD + textwrap.dedent(body)
    outcome = start([sys.executable, "-c", code], 2, tmp_path, {"OMP_NUM_THREADS": "1"}, io.BytesIO())
    return outcome, time.monotonic() - began


def test_r02_a_rank_that_raises_in_step_2_is_named_and_ends_the_run(tmp_path: Path) -> None:
    body = """
        for step in range(100):
            if rank == 1 and step == 2:
                raise ValueError("row 17 cannot be read")
            dist.all_reduce(torch.ones(1000))
    """
    outcome, seconds = run(tmp_path, body)
    assert outcome.exit_code == 1 and seconds < 60
    assert outcome.failure is not None and outcome.failure.rank == 1
    assert "row 17 cannot be read" in outcome.failure.reason


def test_r02_a_killed_rank_is_named_and_not_the_one_that_lost_it(tmp_path: Path) -> None:
    body = """
        for step in range(100):
            if rank == 1 and step == 2:
                os.kill(os.getpid(), 9)
            dist.all_reduce(torch.ones(1000))
    """
    outcome, _ = run(tmp_path, body)
    assert outcome.failure is not None and outcome.failure.rank == 1
    assert outcome.failure.signal == "SIGKILL" and not outcome.failure.out_of_memory


def test_r04_two_runs_at_once_do_not_meet(tmp_path: Path) -> None:
    import threading

    body = """
        value = torch.tensor([float(os.environ["JOB"])])
        dist.all_reduce(value)
        assert value.item() == 2 * float(os.environ["JOB"]), value
        dist.destroy_process_group()
    """
    codes: list[int] = []

    def job(number: int) -> None:
        code = HEAD + textwrap.dedent(body)
        environment = {"OMP_NUM_THREADS": "1", "JOB": str(number)}
        folder = tmp_path / str(number)
        codes.append(start([sys.executable, "-c", code], 2, folder, environment, io.BytesIO()).exit_code)

    threads = [threading.Thread(target=job, args=(n,)) for n in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert codes == [0, 0]
