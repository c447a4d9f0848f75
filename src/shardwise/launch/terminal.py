"""Where a rank's words go: its log, and for rank 0 also the person's terminal."""

import fcntl
import os
import pty
import select
import struct
import sys
import termios
import tty
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO


@dataclass
class Channel:
    """`write_end` is the rank's stdout and stderr. Without an echo it is the log file itself.

    What a rank says before there is a log waits in the pipe.
    """

    write_end: int
    read_end: int | None
    log: IO[bytes] | None
    output: IO[bytes] | None
    _closed: bool = field(default=False)

    def started(self) -> None:
        """The rank has its own write end now; ours must go, or the end of the stream never comes."""
        if self.read_end is not None:
            os.close(self.write_end)

    def keep(self, path: Path) -> None:
        """From now on, what is said is kept there."""
        self.log = path.open("ab", buffering=0)

    def pump(self, wait_seconds: float) -> None:
        """Copy what has come, waiting at most so long for the first of it."""
        for _ in range(64):  # a flood of words must not keep the launcher from its watch
            if self.read_end is None:
                return
            ready, _, _ = select.select([self.read_end], [], [], wait_seconds)
            if not ready:
                return
            wait_seconds = 0.0
            try:
                chunk = os.read(self.read_end, 65536)
            except OSError:  # a pseudo-terminal ends with EIO
                chunk = b""
            if not chunk:
                os.close(self.read_end)
                self.read_end = None
                return
            with suppress(OSError):  # a full disk: what was said still reaches the terminal
                if self.log is not None:
                    self.log.write(chunk)
            if self.output is not None:
                with suppress(OSError, ValueError):  # a closed terminal does not end a run
                    self.output.write(chunk)
                    self.output.flush()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self.pump(0.0)
        if self.read_end is not None:
            os.close(self.read_end)
            self.read_end = None
        if self.log is not None:
            self.log.close()


def open_channel(log_path: Path | None, echo: bool, output: IO[bytes] | None) -> Channel:
    """A log alone, or a log with an echo to `output` (standard error), a terminal if that is one.

    With an echo the log may come later, by `Channel.keep`.
    """
    log = log_path.open("ab", buffering=0) if log_path is not None else None
    if not echo:
        assert log is not None
        return Channel(log.fileno(), None, log, None)
    target = output if output is not None else getattr(sys.stderr, "buffer", None)
    if target is not None and target.isatty():
        read_end, write_end = pty.openpty()
        tty.setraw(write_end)  # bytes pass as they are: no echo, no \n -> \r\n
        with suppress(OSError):
            size = fcntl.ioctl(target.fileno(), termios.TIOCGWINSZ, struct.pack("HHHH", 0, 0, 0, 0))
            fcntl.ioctl(write_end, termios.TIOCSWINSZ, size)
    else:
        read_end, write_end = os.pipe()
    return Channel(write_end, read_end, log, target)
