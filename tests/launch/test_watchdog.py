"""Silent ranks: found, asked for their stacks, the one that the others wait for is named. No torch here."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from shardwise.launch import start, watchdog
from shardwise.runs.heartbeat import Heart, heartbeat_path, read_beat

RANK = """
import faulthandler, os, signal, sys, time
from pathlib import Path
from shardwise.runs.heartbeat import Heart, heartbeat_path, stacks_path
logs, rank = Path(sys.argv[1]), int(os.environ["RANK"])
file = stacks_path(logs, rank).open("w")
faulthandler.register(signal.SIGUSR2, file=file, all_threads=True)
heart = Heart(heartbeat_path(logs, rank))
def stuck_in_the_third_step(): time.sleep({sleep})
def waiting_for_the_others(): time.sleep({sleep})
for step in (1, 2, 3):
    heart.beat(step, "forward", {limit})
    if step == 3 and rank == 1: stuck_in_the_third_step()
    heart.beat(step, "loss of all", {limit})
    if step == 3: waiting_for_the_others()
    time.sleep(0.05)
"""


def test_a_rank_that_hangs_is_named_with_all_stacks_and_ended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchdog, "PATIENCE_SECONDS", 1.0)
    program = RANK.format(sleep=60, limit=1.0)
    began = time.monotonic()
    outcome = start([sys.executable, "-c", program, str(tmp_path)], 2, tmp_path)
    assert time.monotonic() - began < 20
    assert outcome.exit_code == 1 and outcome.failure is not None and outcome.failure.hung
    assert outcome.failure.rank == 1 and "rank 1 hangs" in outcome.failure.reason
    text = capsys.readouterr().err
    assert "stuck_in_the_third_step" in text and "waiting_for_the_others" in text
    assert "--- rank 1 (stuck), last seen at step 3, forward" in text


def test_a_slow_phase_is_asked_about_but_not_ended(tmp_path: Path) -> None:
    outcome = start([sys.executable, "-c", RANK.format(sleep=1.6, limit=1.0), str(tmp_path)], 2, tmp_path)
    assert outcome.exit_code == 0


def computing(seconds: float) -> str:
    """The program whose rank 1 computes in its third step instead of sleeping."""
    busy = f"end = time.monotonic() + {seconds}\n    while time.monotonic() < end: sum(range(1000))\n    sys.exit(0)"
    asleep = f"def stuck_in_the_third_step(): time.sleep({seconds})"
    program = RANK.format(sleep=seconds, limit=1.0).replace(
        asleep, f"def stuck_in_the_third_step():\n    {busy}"
    )
    assert busy in program
    return program


def test_a_rank_that_computes_is_called_slow_in_one_line_and_not_asked_for_stacks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchdog, "BUSY_FACTOR", 20.0)
    outcome = start([sys.executable, "-c", computing(2.5), str(tmp_path)], 2, tmp_path)
    text = capsys.readouterr().err
    assert "warning: rank 1 is slow: " in text and "since step 3, forward, computing all the while" in text
    assert text.count("warning") == 1 and "hangs" not in text and "---" not in text
    assert outcome.exit_code == 0


def test_a_rank_that_computes_for_long_is_asked_and_given_more_time_than_one_that_sleeps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchdog, "PATIENCE_SECONDS", 1.0)
    outcome = start([sys.executable, "-c", computing(6.0), str(tmp_path)], 2, tmp_path)
    text = capsys.readouterr().err
    assert "rank 1 is slow" in text and "rank 1 hangs" in text  # told with stacks in the end, but not ended
    assert "stuck_in_the_third_step" in text
    assert outcome.exit_code == 0


def test_beats_are_read_back_and_a_missing_one_is_none(tmp_path: Path) -> None:
    path = heartbeat_path(tmp_path, 3)
    assert read_beat(path) is None
    heart = Heart(path)
    heart.beat(7, "backward", 2.5)
    heart.beat(8, "a phase with a long name", 2.5)
    beat = read_beat(path)
    assert beat is not None and (beat.count, beat.step, beat.limit_seconds) == (2, 8, 2.5)
    assert beat.overdue_seconds(beat.time_seconds + 3.0) == pytest.approx(0.5)


def test_a_schedulers_warning_is_passed_on_and_a_stop_after_it_is_no_second_one(tmp_path: Path) -> None:
    """Slurm sends SIGUSR1 first and SIGTERM later; only a second SIGTERM or Ctrl-C ends ranks at once."""
    program = (
        "import signal, sys, time\n"
        "seen = []\n"
        "for n in (signal.SIGUSR1, signal.SIGTERM): signal.signal(n, lambda n, f: seen.append(n))\n"
        "print('listening', flush=True)\n"
        "while len(seen) < 2: time.sleep(0.02)\n"
        "sys.exit(75 if seen == [signal.SIGUSR1, signal.SIGTERM] else 1)\n"
    )

    def signals() -> None:
        while b"listening" not in (tmp_path / "rank-0.log").read_bytes():
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGTERM)

    (tmp_path / "rank-0.log").write_bytes(b"")
    threading.Thread(target=signals).start()
    assert start([sys.executable, "-c", program], 1, tmp_path, output=None).exit_code == 75


def test_stopped_before_it_could_listen_is_a_stop_and_no_failure(tmp_path: Path) -> None:
    launcher = (
        "import sys\nfrom pathlib import Path\nfrom shardwise.launch import start\n"
        "out = start([sys.executable, '-c', \"print('up', flush=True); import time; time.sleep(60)\"], 1, "
        f"Path({str(tmp_path)!r}))\nsys.exit(out.exit_code)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", launcher])
    log = tmp_path / "rank-0.log"
    while not log.exists() or b"up" not in log.read_bytes():
        time.sleep(0.02)
    process.terminate()
    assert process.wait(timeout=20) == 75
