"""Ranks that live but do not move: found by their missing beats, asked for their stacks, the stuck one named."""

import os
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from shardwise.runs.heartbeat import Beat, heartbeat_path, read_beat, stacks_path

PATIENCE_SECONDS = 20.0  # of silence after the stacks were asked for: an overloaded machine is no hang
BUSY_PATIENCE_SECONDS = 300.0  # the same while the silent ranks compute: a slow step is no hang either
BUSY_SHARE = 0.05  # of one processor, from which a rank counts as computing
BUSY_FACTOR = 2.5  # a rank that computes is asked for its stacks after so many times the usual limit
RECENT_SECONDS = 2.0  # over which processor time is looked at before the stacks are asked for
STACK_SECONDS = 1.0  # for the ranks to write their stacks
# Frames that show a rank waiting for the others rather than being waited for.
_WAITING = ("distributed_c10d.py", "torch/distributed/", "deepspeed/comm/")


@dataclass(frozen=True)
class Hang:
    """`stuck`: ranks that the others wait for. `sure`: there is no use in waiting (the process is stopped).

    `stacks` is empty for a rank that is only slow: it computes, and was not asked.
    """

    stuck: tuple[int, ...]
    reason: str
    stacks: str
    sure: bool


@dataclass
class Watchdog:
    """Looks at the beats of one start of the ranks."""

    logs: Path
    began_seconds: float
    reported: Hang | None = None
    _slow_since: float = 0.0  # the newest beat for which a slow rank was told
    _recent: list[tuple[float, Mapping[int, float]]] = field(
        default_factory=list
    )  # processor seconds of ranks
    _silent_since: float = 0.0
    _reported_seconds: float = 0.0
    _processor_seconds: Mapping[int, float] = field(
        default_factory=dict
    )  # rank -> when the hang was reported

    @classmethod
    def start(cls, logs: Path, ranks: int) -> "Watchdog":
        for rank in range(ranks):  # beats of an earlier start would look like silence
            for path in (heartbeat_path(logs, rank), stacks_path(logs, rank)):
                path.unlink(missing_ok=True)
        return cls(logs, time.monotonic())

    def look(self, pids: Mapping[int, int]) -> Hang | None:
        """A hang that is new or has become hopeless, else None. `pids`: rank -> process, of those alive.

        The first time a rank is overdue, stacks are collected and told, which disturbs nothing; while one that
        the others may wait for computes, it is only told to be slow, until BUSY_FACTOR times its limit. The ranks are
        given up (`sure`) when one is stopped, or when as much time again passes (at least PATIENCE_SECONDS, or
        BUSY_PATIENCE_SECONDS while the ranks that the others wait for use a processor).
        """
        now = time.monotonic()
        self._note(pids, now)
        beats = {rank: b for rank in pids if (b := read_beat(heartbeat_path(self.logs, rank))) is not None}
        if not beats:
            return None
        overdue = {r: b for r, b in beats.items() if b.overdue_seconds(now) > 0}
        if not overdue:
            self.reported = None
            return None
        newest = max(b.time_seconds for b in beats.values())
        if self.reported is not None and newest == self._silent_since:
            limit = min(b.limit_seconds for b in overdue.values())
            patience = BUSY_PATIENCE_SECONDS if self._busy(pids, now) else PATIENCE_SECONDS
            given_up = now - newest > limit + max(limit, patience)
            return _hopeless(self.reported) if given_up else None
        if self.reported is not None:
            return None  # some rank has moved since: a slow phase, not a hang
        stopped = [r for r in pids if _state(pids[r]) in ("T", "t")]
        computing = [r for r in _behind(beats, {}) if self._computes(r)]
        if computing and not stopped:
            limit = min(b.limit_seconds for b in overdue.values())
            if now - newest <= BUSY_FACTOR * limit:
                if self._slow_since == newest:
                    return None
                self._slow_since = newest
                return _slow(computing, beats, now)
        stacks = _stacks(self.logs, {r: pids[r] for r in beats}, stopped)
        stuck = stopped or _behind(beats, stacks)
        self.reported = _hang(stuck, beats, stacks, bool(stopped), now)
        self._silent_since, self._reported_seconds = newest, time.monotonic()
        self._processor_seconds = {r: _processor_seconds(pid) for r, pid in pids.items()}
        return self.reported

    def _note(self, pids: Mapping[int, int], now: float) -> None:
        self._recent.append((now, {r: _processor_seconds(pid) for r, pid in pids.items()}))
        while len(self._recent) > 2 and self._recent[1][0] <= now - RECENT_SECONDS:
            del self._recent[0]

    def _computes(self, rank: int) -> bool:
        """Whether a rank used a processor lately."""
        (began, before), (ended, after) = self._recent[0], self._recent[-1]
        used = after.get(rank, 0.0) - before.get(rank, after.get(rank, 0.0))
        return used > BUSY_SHARE * (ended - began) > 0

    def _busy(self, pids: Mapping[int, int], now: float) -> bool:
        """Whether every rank that the others wait for has computed since the hang was reported."""
        assert self.reported is not None
        elapsed = now - self._reported_seconds
        return elapsed < STACK_SECONDS or all(  # too short a time to tell
            r in pids and _processor_seconds(pids[r]) - self._processor_seconds[r] > BUSY_SHARE * elapsed
            for r in self.reported.stuck
        )


def _hang(
    stuck: list[int], beats: Mapping[int, Beat], stacks: Mapping[int, str], stopped: bool, now: float
) -> Hang:
    names, beat = _names(stuck), beats.get(stuck[0]) or next(iter(beats.values()))
    state = "is stopped (SIGSTOP)" if stopped else "hangs"
    reason = f"{names} {state}: no sign of life for {now - beat.time_seconds:.1f} s since {beat}"
    text = "\n".join(
        f"--- rank {rank}{' (stuck)' if rank in stuck else ''}, last seen at {beats[rank]}\n{stacks[rank].rstrip()}"
        for rank in sorted(stacks)
    )
    return Hang(tuple(stuck), reason, text, sure=stopped)


def _slow(computing: list[int], beats: Mapping[int, Beat], now: float) -> Hang:
    beat = beats[computing[0]]
    verb = "is" if len(computing) == 1 else "are"
    silence = f"{now - beat.time_seconds:.1f} s since {beat}"
    return Hang(
        tuple(computing), f"{_names(computing)} {verb} slow: {silence}, computing all the while", "", False
    )


def _names(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else "ranks " + ", ".join(map(str, ranks))


def _hopeless(hang: Hang) -> Hang:
    return Hang(hang.stuck, hang.reason, hang.stacks, sure=True)


def _behind(beats: Mapping[int, Beat], stacks: Mapping[int, str]) -> list[int]:
    """The ranks that have come least far; among those, the ones that are not waiting in a collective."""
    least = min(b.count for b in beats.values())
    behind = [r for r, b in beats.items() if b.count == least]
    working = [r for r in behind if not any(w in _main_thread(stacks.get(r, "")) for w in _WAITING)]
    return sorted(working or behind)


def _main_thread(stacks: str) -> str:
    """The main thread comes last in faulthandler's list."""
    return stacks.rpartition("Thread 0x")[2] or stacks


def _stacks(logs: Path, pids: Mapping[int, int], stopped: list[int]) -> dict[int, str]:
    """Every rank's Python stacks, written by itself on SIGUSR2; a stopped process writes them as it goes on."""
    sizes = {}
    for rank, pid in pids.items():
        path = stacks_path(logs, rank)
        sizes[rank] = path.stat().st_size if path.exists() else None
        if sizes[rank] is None:  # it has not got so far as to listen: the signal would end it
            continue
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR2)
            if rank in stopped:
                os.kill(pid, signal.SIGCONT)
    time.sleep(STACK_SECONDS)
    found = {}
    for rank in pids:
        size = sizes[rank]
        text = stacks_path(logs, rank).read_text(errors="replace")[size:] if size is not None else ""
        found[rank] = text or "(it wrote no stack)"
    return found


def _state(pid: int) -> str:
    """R, S, D, T (stopped), Z ... from /proc; empty elsewhere."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def _processor_seconds(pid: int) -> float:
    """User and system time of a process (fields 14 and 15 of /proc/PID/stat, in clock ticks); 0 elsewhere."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    except (OSError, IndexError, ValueError):
        return 0.0
