"""One writer per run folder: a file that names who is at work there.

The file says process id, host and the process's start, so that a number used again by another process is not
taken for the old holder. A holder that is gone is replaced; one on another host cannot be looked at from here
and is believed.
"""

import fcntl
import os
import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.errors import UsageError
from shardwise.runs.jsonfile import read_json, write_json


@dataclass(frozen=True)
class Holder:
    """Who works in a run folder. `started`: the process's start in clock ticks since boot, 0 if not known."""

    pid: int
    host: str
    started: int
    since_unix_seconds: float

    @property
    def here(self) -> bool:
        return self.host == socket.gethostname()

    def alive(self) -> bool:
        """Whether the process still runs; a holder on another host counts as alive."""
        if not self.here:
            return True
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            pass
        begun, zombie = _process(self.pid)
        return not zombie and (not self.started or not begun or begun == self.started)

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


def holder(path: Path) -> Holder | None:
    """Who the lock file names, alive or not; None when nobody."""
    found: dict[str, Any] | None = read_json(path)
    try:
        return (
            Holder(
                int(found["pid"]),
                str(found["host"]),
                int(found["started"]),
                float(found["since_unix_seconds"]),
            )
            if found
            else None
        )
    except (KeyError, TypeError, ValueError):
        return None


def holder_of(pid: int) -> Holder:
    """A process of this machine, as it can be told later from another one with its number."""
    return Holder(pid, socket.gethostname(), _process(pid)[0], time.time())


def acquire(path: Path) -> Holder:
    """Write this process into the lock file. Raises UsageError naming a holder that is alive."""
    guard = os.open(path.parent, os.O_RDONLY)  # the folder itself serialises two that look at the same time
    try:
        with suppress(OSError):  # file systems without flock: the check below still holds but for a moment
            fcntl.flock(guard, fcntl.LOCK_EX)
        refuse_if_held(path)
        me = holder_of(os.getpid())
        write_json(path, me.__dict__)
        return me
    finally:
        os.close(guard)


def refuse_if_held(path: Path) -> None:
    """Raise UsageError naming a holder that is alive and is not this process."""
    other = holder(path)
    if other and other.alive() and not _is_me(other):
        raise UsageError(
            f"run '{path.parent.name}' is in use",
            f"{other} has been at work in '{path.parent}' since {_clock(other.since_unix_seconds)}",
            "wait for it, stop it, or give this run another name with --set run.name=NAME"
            if other.here
            else f"if that process is gone, delete '{path}'",
        )


def release(path: Path) -> None:
    """Remove the lock file if it is this process's own."""
    current = holder(path)
    if current and _is_me(current):
        path.unlink(missing_ok=True)


def _is_me(other: Holder) -> bool:
    return other.here and other.pid == os.getpid() and other.alive()


def _process(pid: int) -> tuple[int, bool]:
    """(start in ticks since boot, whether it is a zombie) from /proc; (0, False) elsewhere."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return int(fields[19]), fields[0] == "Z"
    except (OSError, IndexError, ValueError):
        return 0, False


def _clock(unix_seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(unix_seconds))
