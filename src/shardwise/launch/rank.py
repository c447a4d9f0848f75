"""One rank under somebody else's launcher: `python -m shardwise.launch.rank RUN_FOLDER`.

torchrun and Ray tell a failed rank as exit code 1, whatever it was, and start every rank again with the same
command. This process stands between: it goes on from the newest checkpoint when there is one, keeps the rank's
log in the run folder, and leaves a record of how the rank ended that survives the launcher.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType

from shardwise.errors import Interrupted, UsageError
from shardwise.launch.ahead import RANK, rank_environment
from shardwise.launch.guard import bind, guarded
from shardwise.launch.local import ECHOES
from shardwise.launch.terminal import open_channel
from shardwise.runs import RunFolder
from shardwise.runs.jsonfile import read_json, write_json

ATTEMPT = "SHARDWISE_ATTEMPT"  # environment: one value per start of the whole job, the same on every node
TAIL_LINES, TAIL_BYTES = 20, 16 * 1024
POLL_SECONDS = 0.05
STOP_FILE_SECONDS = 2.0  # between looks: the file system may be a shared one


@dataclass(frozen=True)
class RankEnd:
    """How one rank ended. `echo`: it only noticed that another one was gone."""

    attempt: str
    rank: int
    world_size: int
    exit_code: int
    host: str
    reason: str
    echo: bool
    time: float


def end_path(run: RunFolder, rank: int) -> Path:
    return run.logs_path / f"end-{rank}.json"


def log_path(run: RunFolder, rank: int) -> Path:
    return run.logs_path / f"rank-{rank}.log"


def stop_path(run: RunFolder) -> Path:
    """A file that asks every rank to save and stop, where no scheduler can pass a signal on."""
    return run.logs_path / "stop"


def rank_ends(run: RunFolder, attempt: str) -> list[RankEnd]:
    """What the ranks of one attempt have left, by rank."""
    found = []
    for path in run.logs_path.glob("end-*.json"):
        with suppress(TypeError):
            end = RankEnd(**(read_json(path) or {}))
            if end.attempt == attempt:
                found.append(end)
    return sorted(found, key=lambda end: end.rank)


def run_rank(run: RunFolder, environment: Mapping[str, str], echo: bool = False) -> int:
    """Run one rank to its end; the variables torchrun sets (RANK, WORLD_SIZE ...) are in `environment`.

    What it writes goes to its log in the run folder; with `echo`, rank 0's to standard error too.

    Returns its exit code: 0 done, 1 failed, 2 refused, 75 stopped with its state saved.
    """
    rank, attempt = int(environment["RANK"]), environment.get(ATTEMPT, "")
    record = end_path(run, rank)
    earlier = read_json(record) or {}
    if attempt and earlier.get("attempt") == attempt:
        code = earlier.get("exit_code")
        if code == UsageError.exit_code:
            return code  # refused a moment ago: the launcher's next try would only say so again
        if code == Interrupted.exit_code and stop_path(run).exists():
            return code  # stopped because a person asked: the launcher takes it for a failure and tries again
    record.unlink(missing_ok=True)
    run.logs_path.mkdir(parents=True, exist_ok=True)
    log = log_path(run, rank)
    command = [*RANK, str(run.path)]
    command += ["--resume"] if run.checkpoints() else []
    channel = open_channel(log, echo=echo and rank == 0, output=None)
    process = subprocess.Popen(
        guarded(command),
        stdin=subprocess.DEVNULL,
        stdout=channel.write_end,
        stderr=channel.write_end,
        env=rank_environment(environment),
    )
    channel.started()
    asked = _pass_on(process)
    look_at = 0.0
    while process.poll() is None:
        channel.pump(POLL_SECONDS)
        if channel.read_end is None:
            time.sleep(POLL_SECONDS)
        if time.monotonic() >= look_at:
            look_at = time.monotonic() + STOP_FILE_SECONDS
            if stop_path(run).exists():
                process.send_signal(signal.SIGTERM)
                asked.append(signal.SIGTERM)
                look_at = float("inf")
    channel.pump(0.0)
    channel.close()
    code = process.returncode
    if asked and code == -signal.SIGTERM:  # before it could listen: there is nothing that is not saved
        code = Interrupted.exit_code
    tail = _tail(log)
    said = next((line for line in reversed(tail) if line.startswith("error:")), tail[-1] if tail else "")
    killed = f"killed by {_signal_name(-code)}" if code < 0 else ""
    end = RankEnd(
        attempt=attempt,
        rank=rank,
        world_size=int(environment.get("WORLD_SIZE", 1)),
        exit_code=code if code >= 0 else 1,
        host=os.uname().nodename,
        reason=killed or (said.strip() if code else ""),
        echo=code == -signal.SIGTERM  # its launcher ended it because of another one
        or (not killed and any(echo in "\n".join(tail) for echo in ECHOES)),
        time=time.time(),
    )
    with suppress(OSError):  # a run folder that was discarded, or a full disk: the exit code still tells
        write_json(record, asdict(end))
    return end.exit_code


def _pass_on(process: "subprocess.Popen[bytes]") -> list[int]:
    """A request to stop goes to the rank, which saves and ends. The list tells that one came."""
    asked: list[int] = []

    def on_signal(number: int, _: FrameType | None) -> None:
        asked.append(number)
        with suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        with suppress(ValueError):  # not the main thread, as in a Ray worker
            signal.signal(number, on_signal)
    return asked


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _tail(log: Path) -> list[str]:
    with suppress(OSError), log.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
        lines = file.read().decode("utf-8", "replace").splitlines()
        return [line for line in lines if line.strip()][-TAIL_LINES:]
    return []


if __name__ == "__main__":
    bind(os.getppid())  # a killed torchrun leaves its workers behind otherwise
    sys.exit(run_rank(RunFolder(Path(sys.argv[1])), os.environ))
