"""The page, listening on a free port of this machine."""

import socket
import threading
import time

import uvicorn

from shardwise.web.app import create_app
from shardwise.web.guard import Access
from shardwise.web.library import Library

TOKEN = "test-token-0123456789"


class Page:
    """A served page: `address` without token, `open` with it."""

    def __init__(self, library: Library, password: str | None = None) -> None:
        self.socket = socket.socket()
        self.socket.bind(("127.0.0.1", 0))
        self.port = self.socket.getsockname()[1]
        self.access = Access("127.0.0.1", self.port, token=TOKEN, password=password)
        self.library = library
        self.address = f"http://127.0.0.1:{self.port}"
        app = create_app(library, self.access)
        self.server = uvicorn.Server(
            uvicorn.Config(app, log_level="warning", lifespan="off", proxy_headers=False)
        )
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [self.socket]}, daemon=True)
        self.thread.start()
        while not self.server.started:
            time.sleep(0.01)

    def close(self) -> None:
        self.server.should_exit = True
        self.thread.join(timeout=10)
