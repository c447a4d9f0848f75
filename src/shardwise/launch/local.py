"""Ranks on this machine: start them, watch them, and leave none behind.

The launcher is the process of the command line. It lives to see how each rank ends, which a rank killed for
want of memory cannot tell by itself.
"""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import IO

from shardwise.errors import UsageError
from shardwise.launch.ahead import Ahead, rank_environment, spawn
from shardwise.launch.memory import kernel_kills, resident_bytes
from shardwise.launch.ports import choose_port
from shardwise.launch.terminal import Channel, open_channel
from shardwise.launch.watchdog import Hang, Watchdog
from shardwise.runs.heartbeat import heartbeat_path, read_beat
from shardwise.units import format_bytes

INTERRUPTED = 75  # exit code of a rank that stopped on request with its state saved
DISK_FULL = 74  # exit code of ranks that had no room for a checkpoint
SETTLE_SECONDS = 1.5  # after a death: time in which the others' own deaths and last words are gathered
KILLED_SETTLE_SECONDS = 0.3  # the same after a SIGKILL, which is never a consequence of another death
POLL_SECONDS = 0.05
TAIL_LINES = 20
# The last line of a Python traceback, as plain Python and as torch print it.
_RAISED = re.compile(r"^(?:\[rank\d+\]: )?([A-Za-z_][\w.]*(?:Error|Exception)\b.*)")

# What a rank says when a peer is gone: a consequence, never named as the cause while there is another one.
ECHOES = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Connection refused",
    "Broken pipe",
    "Timed out waiting",
    "remote process exited",
    "ProcessGroupNCCL's watchdog",
)


@dataclass(frozen=True)
class Failure:
    """How the rank that brought a run down ended. `reason` is one line; `tail` the last lines of its log."""

    rank: int
    reason: str
    exit_code: int | None
    signal: str | None
    out_of_memory: bool
    log: Path
    tail: tuple[str, ...]
    hung: bool = False  # it lived and did not move; the launcher ended it
    noticed_unix_seconds: float = 0.0
    silent_seconds: float | None = None  # from its last sign of life to that moment


@dataclass(frozen=True)
class Outcome:
    """`exit_code`: 0 done, 1 failed, 2 refused before it started, 74 disk full, 75 stopped, state saved."""

    exit_code: int
    failure: Failure | None
    peak_resident_bytes: tuple[int, ...]  # per rank, sampled
    stop_asked: bool = False


@dataclass
class _Rank:
    number: int
    process: subprocess.Popen[bytes]
    log_path: Path
    channel: Channel
    peak_resident_bytes: int = 0
    ended_at: float | None = None  # monotonic
    ended_unix_seconds: float = 0.0


@dataclass
class _Watch:
    """State of one run as its launcher sees it."""

    ranks: list[_Rank]
    dog: Watchdog
    stops_asked: int = 0
    sent: set[int] = field(default_factory=set)  # signals passed on
    killed_by_us: set[int] = field(default_factory=set)
    hang: Hang | None = None

    def alive(self) -> list[_Rank]:
        return [r for r in self.ranks if r.ended_at is None]

    def send(self, number: int) -> None:
        self.sent.add(number)
        for rank in self.alive():
            with suppress(ProcessLookupError):
                rank.process.send_signal(number)

    def kill(self) -> None:
        """End every rank and whatever it started, at once."""
        for rank in self.ranks:
            if rank.ended_at is None:
                self.killed_by_us.add(rank.number)
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(rank.process.pid, signal.SIGKILL)


def start(
    command: Sequence[str],
    processes: int,
    logs: Path,
    environment: Mapping[str, str] | None = None,
    output: IO[bytes] | None = None,
    ahead: Ahead | None = None,
) -> Outcome:
    """Run `command` as `processes` ranks and wait for their end.

    Each rank gets RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT as torchrun
    sets them, a process group of its own, and `logs`/rank-N.log. What rank 0 writes is copied to `output` too
    (standard error when None), through a pseudo-terminal when that is one. SIGINT and SIGTERM are passed on
    once, so that the ranks can save and stop; a second one ends them at once. When one rank dies, the others
    are ended within seconds. No rank survives the launcher (on Linux, not even its `kill -9`).

    A process that waits `ahead` becomes the rank of a run that has one.

    Raises UsageError when the environment fixes MASTER_PORT to a port that is in use.
    """
    if processes < 1:
        raise UsageError(f"processes: {processes}", "a run has at least one rank", "use engine.processes: 1")
    logs.mkdir(parents=True, exist_ok=True)
    given = {**os.environ, **(environment or {})}
    port = choose_port(given.get("MASTER_PORT"))
    kills_before = kernel_kills()
    watch = _Watch([], Watchdog.start(logs, processes))
    previous = _install(watch)
    try:
        for number in range(processes):
            ours = _environment(given, number, processes, port)
            log = logs / f"rank-{number}.log"
            waiting = ahead.take(command, ours, log) if ahead and processes == 1 else None
            if waiting is None:
                channel = open_channel(log, echo=number == 0, output=output)
                waiting = spawn(command, channel, ours), channel
            watch.ranks.append(_Rank(number, waiting[0], log, waiting[1]))
        _wait(watch)
    finally:
        watch.kill()
        for rank in watch.ranks:
            rank.process.wait()
            rank.channel.close()
        _restore(previous)
    return _outcome(watch, kills_before)


def _environment(given: Mapping[str, str], number: int, processes: int, port: int) -> dict[str, str]:
    ours = {
        "RANK": str(number),
        "WORLD_SIZE": str(processes),
        "LOCAL_RANK": str(number),
        "LOCAL_WORLD_SIZE": str(processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    if processes > 1:  # one thread pool per rank over all cores would only fight
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        ours["OMP_NUM_THREADS"] = given.get("OMP_NUM_THREADS") or str(max(1, cores // processes))
        # gloo asks for the host's own name otherwise, which need not resolve, and would listen to the network
        loopback = "lo0" if sys.platform == "darwin" else "lo"
        ours["GLOO_SOCKET_IFNAME"] = given.get("GLOO_SOCKET_IFNAME") or loopback
    return {**rank_environment(given), **ours}


def _install(watch: _Watch) -> dict[int, object]:
    """Take SIGINT, SIGTERM and SIGUSR1 (a scheduler's warning); returns what stood there before."""

    def on_signal(number: int, _: FrameType | None) -> None:
        if number == signal.SIGUSR1:
            watch.send(number)
            return
        watch.stops_asked += 1
        if watch.stops_asked == 1:
            watch.send(number)
        else:
            watch.kill()

    previous: dict[int, object] = {}
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        with suppress(ValueError):  # not the main thread: whoever owns it handles signals
            previous[number] = signal.signal(number, on_signal)
    return previous


def _restore(previous: Mapping[int, object]) -> None:
    for number, handler in previous.items():
        signal.signal(number, handler)  # type: ignore[arg-type]


def _wait(watch: _Watch) -> None:
    """Until every rank has ended; a rank's failure gives the others SETTLE_SECONDS."""
    end_at = float("inf")
    next_sample = 0.0
    while watch.alive():
        for rank in watch.alive():
            rank.channel.pump(POLL_SECONDS if rank.number == 0 else 0.0)
        if not any(rank.number == 0 for rank in watch.alive()):
            time.sleep(POLL_SECONDS)
        now = time.monotonic()
        sample = now >= next_sample
        for rank in watch.alive():
            if sample:
                held = resident_bytes(rank.process.pid)
                rank.peak_resident_bytes = max(rank.peak_resident_bytes, held)
            code = rank.process.poll()
            if code is None:
                continue
            rank.ended_at, rank.ended_unix_seconds = now, time.time()
            rank.channel.pump(0.0)
            if code not in (0, INTERRUPTED):
                settle = KILLED_SETTLE_SECONDS if code == -signal.SIGKILL else SETTLE_SECONDS
                end_at = min(end_at, now + settle)
        if sample:
            next_sample = now + 0.5
            _look_for_hang(watch)
        if now >= end_at:
            watch.kill()


def _look_for_hang(watch: _Watch) -> None:
    """Tell a hang with every rank's stacks; end the ranks when there is no hope."""
    hang = watch.dog.look({r.number: r.process.pid for r in watch.alive()})
    if hang is None:
        return
    if watch.hang is None or watch.hang.reason != hang.reason:
        print(f"warning: {hang.reason}\n{hang.stacks}".rstrip(), file=sys.stderr, flush=True)
    if hang.sure:
        watch.hang = hang
        watch.kill()


def _outcome(watch: _Watch, kills_before: int) -> Outcome:
    peaks = tuple(r.peak_resident_bytes for r in watch.ranks)
    asked = bool(watch.sent)
    if watch.hang is not None:
        rank = watch.ranks[watch.hang.stuck[0]]
        tail = tuple(_tail(rank.log_path))
        failure = Failure(rank.number, watch.hang.reason, None, None, False, rank.log_path, tail, hung=True)
        return Outcome(1, _when(failure, watch, time.monotonic(), time.time()), peaks, asked)
    failed = [
        r
        for r in watch.ranks
        if r.process.returncode not in (0, INTERRUPTED) and r.number not in watch.killed_by_us
    ]
    if not failed and watch.killed_by_us:
        rank = watch.ranks[min(watch.killed_by_us)]
        reason = "ended at once on a second request to stop; nothing was saved by it"
        failure = Failure(rank.number, reason, None, "SIGKILL", False, rank.log_path, ())
        return Outcome(1, failure, peaks, asked)
    if not failed:
        codes = {r.process.returncode for r in watch.ranks}
        return Outcome(INTERRUPTED if INTERRUPTED in codes else 0, None, peaks, asked)
    # before they could listen: nothing to save; a stop is a stop whoever sent it
    stops = (*watch.sent, signal.SIGTERM, signal.SIGINT)
    stopped = [r for r in failed if -r.process.returncode in stops]
    if stopped and all(r in stopped or _guilt(r)[0] for r in failed):
        return Outcome(INTERRUPTED, None, peaks, True)
    guilty = min(failed, key=_guilt)
    failure = _describe(guilty, kernel_kills() > kills_before, peaks)
    failure = _when(failure, watch, guilty.ended_at or time.monotonic(), guilty.ended_unix_seconds)
    # 2 means that nothing was started: only when every rank that spoke for itself says so
    refused = all(r.process.returncode == 2 for r in failed)
    code = 2 if refused else DISK_FULL if failure.exit_code == DISK_FULL else 1
    return Outcome(code, failure, peaks, asked)


def _when(failure: Failure, watch: _Watch, noticed: float, unix_seconds: float) -> Failure:
    """With the moment it was noticed, and how long the rank had been silent by then."""
    beat = read_beat(heartbeat_path(watch.dog.logs, failure.rank))
    silent = None if beat is None else max(0.0, noticed - beat.time_seconds)
    return replace(failure, noticed_unix_seconds=unix_seconds, silent_seconds=silent)


def _guilt(rank: _Rank) -> tuple[bool, bool, float, int]:
    """Sorts the cause of a failure before its consequences."""
    text = "\n".join(_tail(rank.log_path))
    killed = rank.process.returncode < 0
    # gloo and NCCL end a process by SIGABRT when a peer has gone: a consequence as well
    aborted = rank.process.returncode == -signal.SIGABRT
    echo = aborted or (not killed and any(e in text for e in ECHOES))
    return echo, not killed or aborted, rank.ended_at or float("inf"), rank.number


def _describe(rank: _Rank, kernel_killed: bool, peaks: tuple[int, ...]) -> Failure:
    code = rank.process.returncode
    tail = tuple(_tail(rank.log_path))
    held = f"it held {format_bytes(peaks[rank.number])} when last seen" if peaks[rank.number] else ""
    if code >= 0:
        said = next((line for line in reversed(tail) if line.startswith("error:")), tail[-1] if tail else "")
        reason = f"rank {rank.number} ended with exit code {code}" + (f": {said.strip()}" if said else "")
        oom = "OutOfMemoryError" in "\n".join(tail) or "can't allocate memory" in "\n".join(tail)
        return Failure(rank.number, reason, code, None, oom, rank.log_path, tail)
    raised = next((found[1] for line in reversed(tail) if (found := _RAISED.match(line))), None)
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    oom = code == -signal.SIGKILL and kernel_killed
    if oom:
        reason = f"rank {rank.number} was killed by the kernel because the machine ran out of memory"
    elif -code == signal.SIGABRT and raised:  # a communication thread aborts a process that is ending anyway
        reason = f"rank {rank.number} ended with {raised.strip()} (then {name})"
    else:
        reason = f"rank {rank.number} was killed by {name}"
    reason += f" ({held})" if held else ""
    return Failure(rank.number, reason, None, name, oom, rank.log_path, tail)


def _tail(log: Path) -> list[str]:
    """The last lines of a log; progress bars leave only their last state."""
    try:
        with log.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - 64 * 1024))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return []
    lines = [line.rsplit("\r", 1)[-1] for line in text.replace("\r\n", "\n").split("\n")]
    return [line for line in lines if line.strip()][-TAIL_LINES:]
