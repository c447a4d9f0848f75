"""Ranks that run plain Python: how they start, end, fail and are ended."""

import io
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from shardwise.errors import UsageError
from shardwise.launch import Outcome, local, start


def run(tmp_path: Path, code: str, processes: int = 2, **options: object) -> Outcome:
    command = [sys.executable, "-S", "-c", textwrap.dedent(code)]
    return start(command, processes, tmp_path / "logs", output=io.BytesIO(), **options)  # type: ignore[arg-type]


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state != "Z"


def wait_for(path: Path, seconds: float = 10) -> str:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if path.exists() and path.read_text():
            return path.read_text()
        time.sleep(0.02)
    raise AssertionError(f"{path} did not appear")


def test_every_rank_knows_who_it_is_and_writes_its_own_log(tmp_path: Path) -> None:
    code = """
        import os
        print(*(os.environ[k] for k in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR")))
    """
    outcome = run(tmp_path, code, 3)
    assert outcome.exit_code == 0 and outcome.failure is None
    logs = [(tmp_path / f"logs/rank-{n}.log").read_text().strip() for n in range(3)]
    assert logs == [f"{n} {n} 3 127.0.0.1" for n in range(3)]


def test_rank_0_is_heard_and_the_others_are_not(tmp_path: Path) -> None:
    heard = io.BytesIO()
    code = "import os; print('rank', os.environ['RANK'], 'speaks')"
    start([sys.executable, "-S", "-c", code], 2, tmp_path, output=heard)
    assert heard.getvalue() == b"rank 0 speaks\n"


@pytest.mark.parametrize(
    ("codes", "expected"), [((0, 0), 0), ((75, 75), 75), ((0, 75), 75), ((2, 2), 2), ((2, 0), 2), ((1, 2), 1)]
)
def test_exit_codes_of_ranks_become_one(tmp_path: Path, codes: tuple[int, int], expected: int) -> None:
    outcome = run(tmp_path, f"import os; raise SystemExit({codes}[int(os.environ['RANK'])])")
    assert outcome.exit_code == expected


def test_r02_one_rank_fails_all_are_gone_within_seconds_and_the_cause_is_told(tmp_path: Path) -> None:
    code = """
        import os, pathlib, sys, time
        if os.environ["RANK"] == "1":
            time.sleep(0.3)
            sys.exit("ValueError: row 17 is broken")
        pathlib.Path(%r).write_text(str(os.getpid()))
        time.sleep(600)
    """ % str(tmp_path / "pid")  # noqa: UP031 - braces of the code
    began = time.monotonic()
    outcome = run(tmp_path, code)
    assert time.monotonic() - began < 8
    assert outcome.exit_code == 1 and outcome.failure is not None
    assert outcome.failure.rank == 1 and outcome.failure.exit_code == 1
    assert "row 17 is broken" in outcome.failure.reason
    assert not alive(int((tmp_path / "pid").read_text()))


def test_a_peers_lost_connection_is_not_named_as_the_cause(tmp_path: Path) -> None:
    code = """
        import os, sys, time
        if os.environ["RANK"] == "0":
            sys.exit("RuntimeError: [gloo] Connection closed by peer [127.0.0.1]:3333")
        time.sleep(0.5)
        sys.exit("ValueError: the real reason")
    """
    failure = run(tmp_path, code).failure
    assert failure is not None and failure.rank == 1 and "the real reason" in failure.reason


def test_death_by_signal_is_named(tmp_path: Path) -> None:
    code = """
        import os, time
        if os.environ["RANK"] == "1":
            os.kill(os.getpid(), 11)
        time.sleep(60)
    """
    failure = run(tmp_path, code).failure
    assert failure is not None and failure.signal == "SIGSEGV" and failure.rank == 1
    assert not failure.out_of_memory


def test_a_kill_by_the_kernel_is_told_as_want_of_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = iter([3, 4])
    monkeypatch.setattr(local, "kernel_kills", lambda: next(counts))
    code = """
        import os, signal, time
        time.sleep(0.8)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    failure = run(tmp_path, code, 1).failure
    assert failure is not None and failure.out_of_memory
    assert "ran out of memory" in failure.reason and "it held" in failure.reason


def test_a_kill_by_a_person_is_not(tmp_path: Path) -> None:
    failure = run(tmp_path, "import os, signal; os.kill(os.getpid(), signal.SIGKILL)", 1).failure
    assert failure is not None and failure.signal == "SIGKILL" and not failure.out_of_memory


LAUNCHER = """
import io, os, sys
from pathlib import Path
from shardwise.launch import start
rank = '''
import os, pathlib, signal, sys, time
got = []
signal.signal(signal.SIGTERM, lambda *_: got.append(1))
pathlib.Path({folder!r}, "pid" + os.environ["RANK"]).write_text(str(os.getpid()))
end = time.monotonic() + 60
while time.monotonic() < end:
    time.sleep(0.05)
    if got and {obey}:
        time.sleep(0.2)
        sys.exit(75 if len(got) == 1 else 1)
'''
outcome = start([sys.executable, "-S", "-c", rank], 2, Path({folder!r}) / "logs", output=io.BytesIO())
sys.exit(outcome.exit_code)
"""


def launcher(folder: Path, obey: bool) -> tuple[subprocess.Popen[bytes], list[int]]:
    process = subprocess.Popen([sys.executable, "-c", LAUNCHER.format(folder=str(folder), obey=obey)])
    return process, [int(wait_for(folder / f"pid{n}")) for n in range(2)]


def test_a_request_to_stop_reaches_every_rank_once(tmp_path: Path) -> None:
    process, pids = launcher(tmp_path, obey=True)
    process.send_signal(signal.SIGTERM)
    assert process.wait(10) == 75
    assert not any(map(alive, pids))


def test_a_second_request_ends_ranks_that_do_not_listen(tmp_path: Path) -> None:
    process, pids = launcher(tmp_path, obey=False)
    process.send_signal(signal.SIGTERM)
    time.sleep(0.3)
    assert all(map(alive, pids))
    process.send_signal(signal.SIGTERM)
    assert process.wait(10) == 1
    assert not any(map(alive, pids))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the bond is the Linux kernel's")
def test_no_rank_survives_kill_9_of_the_launcher(tmp_path: Path) -> None:
    process, pids = launcher(tmp_path, obey=True)
    process.kill()
    process.wait(10)
    end = time.monotonic() + 5
    while any(map(alive, pids)) and time.monotonic() < end:
        time.sleep(0.05)
    assert not any(map(alive, pids))


def test_what_a_rank_started_ends_with_it(tmp_path: Path) -> None:
    code = f"""
        import pathlib, subprocess, sys
        child = subprocess.Popen(["sleep", "300"])
        pathlib.Path({str(tmp_path / "pid")!r}).write_text(str(child.pid))
        sys.exit(1)
    """
    assert run(tmp_path, code, 1).exit_code == 1
    end = time.monotonic() + 5
    while alive(int((tmp_path / "pid").read_text())) and time.monotonic() < end:
        time.sleep(0.05)
    assert not alive(int((tmp_path / "pid").read_text()))


def test_r04_two_jobs_at_once_get_two_ports(tmp_path: Path) -> None:
    code = "import os, time; print(os.environ['MASTER_PORT']); time.sleep(0.5)"
    threads = [
        threading.Thread(target=run, args=(tmp_path / str(n), code), kwargs={"environment": {}})
        for n in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ports = {(tmp_path / f"{n}/logs/rank-{r}.log").read_text() for n in range(2) for r in range(2)}
    assert len(ports) == 2


def test_r04_a_port_that_is_fixed_and_taken_is_refused_before_anything_starts(tmp_path: Path) -> None:
    import socket

    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        port = str(held.getsockname()[1])
        with pytest.raises(UsageError, match=port):
            run(tmp_path, "print(1)", environment={"MASTER_PORT": port})
    assert not list((tmp_path / "logs").glob("rank-*"))


def test_the_terminal_stays_a_terminal_for_rank_0(tmp_path: Path) -> None:
    import pty

    leader, follower = pty.openpty()
    with os.fdopen(follower, "wb", buffering=0) as output:
        start(
            [sys.executable, "-S", "-c", "import sys; print(sys.stderr.isatty())"], 1, tmp_path, output=output
        )
        assert b"True" in os.read(leader, 1000)
    os.close(leader)
