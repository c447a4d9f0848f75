"""Runs a command that cannot outlive its launcher: `python guard.py LAUNCHER_PID COMMAND...`.

A file of its own, run with `python -I -S`, because the bond must be made in the rank's own process before
anything else happens there, and because it must cost milliseconds.
"""

import ctypes
import os
import signal
import sys

GUARD = os.path.abspath(__file__)
PR_SET_PDEATHSIG = 1  # prctl(2): the signal this process gets when the thread that started it ends


def guarded(command: list[str]) -> list[str]:
    """The command that runs `command` bound to this process."""
    return [sys.executable, "-I", "-S", GUARD, str(os.getpid()), *command]


def bind(launcher: int) -> None:
    """Linux kills us when the launcher dies, also by `kill -9`; kept over exec. No bond elsewhere."""
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != launcher:  # it died before the bond was made
        os._exit(1)


if __name__ == "__main__":
    bind(int(sys.argv[1]))
    os.execv(sys.argv[2], sys.argv[2:])
