"""Listening: one socket, bound before anything is said, so that the printed address is the true one."""

import socket
import sys
import webbrowser
from collections.abc import Sequence
from pathlib import Path

import uvicorn

from shardwise.errors import UsageError
from shardwise.web.app import create_app
from shardwise.web.guard import Access, check_bind, is_loopback
from shardwise.web.library import Library


def serve(
    folder: Path,
    data: Sequence[str],
    models: Sequence[str],
    host: str,
    port: int,
    password: str | None,
    names: Sequence[str] = (),
    open_browser: bool = False,
) -> None:
    """Serve until stopped. Raises UsageError for a public bind without a password or a port in use."""
    check_bind(host, password)
    listening = _listen(host, port)
    names = (*names, *(() if is_loopback(host) else (socket.gethostname(), socket.getfqdn())))
    access = Access(host, listening.getsockname()[1], password=password, names=tuple(names))
    app = create_app(Library(folder, tuple(data), tuple(models)), access)
    if not is_loopback(host):
        print(
            f"warning: {host} can be reached by other machines, and what is sent is not encrypted; "
            "ssh -L is the safer way",
            file=sys.stderr,
        )
    print(f"shardwise is at {access.address}\nCtrl-C ends the page; runs go on.", flush=True)
    if open_browser:
        webbrowser.open(access.address)
    config = uvicorn.Config(
        app, log_level="warning", access_log=False, server_header=False, proxy_headers=False, lifespan="off"
    )
    uvicorn.Server(config).run(sockets=[listening])


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        made = socket.socket(family, kind, protocol)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
    except OSError as problem:
        raise UsageError(
            f"cannot listen on {host}, port {port}",
            problem.strerror or str(problem),
            "choose another with --port",
        ) from None
    return made
