"""A free TCP port for the ranks to meet on."""

import socket

from shardwise.errors import UsageError

LOOPBACK = "127.0.0.1"


def choose_port(fixed: str | None) -> int:
    """A free port, chosen by the system; or `fixed` (MASTER_PORT of the environment) if that one is free.

    Raises UsageError when the fixed port is no port or is in use.
    """
    if not fixed:
        with socket.socket() as probe:
            probe.bind((LOOPBACK, 0))
            port: int = probe.getsockname()[1]
            return port
    if not fixed.isdecimal() or not 0 < int(fixed) < 65536:
        raise UsageError(
            f"MASTER_PORT={fixed}",
            "a TCP port is a number from 1 to 65535",
            "unset MASTER_PORT: a free one is chosen",
        )
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # one just left (TIME_WAIT) is free
        try:
            probe.bind((LOOPBACK, int(fixed)))
        except OSError as problem:
            raise UsageError(
                f"MASTER_PORT={fixed} cannot be used on {LOOPBACK}",
                f"{problem.strerror}: another job holds it",
                "unset MASTER_PORT: a free one is chosen for every run",
            ) from None
    return int(fixed)
