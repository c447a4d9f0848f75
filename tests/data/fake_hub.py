"""As much of a Hugging Face hub as serves one dataset or model: listing, file facts, files with ranges."""

import hashlib
import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

COMMIT = "c0ffee" * 6 + "beef"


@dataclass
class Hub:
    """`log`: every request, as METHOD PATH [RANGE]. `failures`: answers 503 that are still to be given to reads."""

    endpoint: str
    log: list[str] = field(default_factory=list)
    failures: int = 0


@contextmanager
def serve(name: str, files: Mapping[str, bytes], kind: str = "dataset") -> Iterator[Hub]:
    """A hub that knows the dataset (or `kind` "model") `name` (ORG/NAME)."""
    hub, place = Hub(""), "/datasets" if kind == "dataset" else ""
    entries = [
        {"type": "file", "path": path, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
        for path, data in files.items()
    ]

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
            self.send_response(status)
            headers.setdefault("Content_Length", str(len(body)))
            for key, value in headers.items():
                self.send_header(key.replace("_", "-"), value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def tell(self, tree: Any, status: int = 200) -> None:
            self.answer(status, json.dumps(tree).encode(), Content_Type="application/json")

        def file(self, path: str) -> None:
            data = files[path]
            facts = {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X_Repo_Commit": COMMIT}
            facts["Accept_Ranges"] = "bytes"
            if self.command == "HEAD":
                return self.answer(200, b"", Content_Length=str(len(data)), **facts)
            if hub.failures:
                hub.failures -= 1
                return self.answer(503)
            wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
            if not wanted:
                return self.answer(200, data, **facts)
            first, last = int(wanted[1]), min(int(wanted[2] or len(data) - 1), len(data) - 1)
            part = data[first : last + 1]
            return self.answer(206, part, Content_Range=f"bytes {first}-{last}/{len(data)}", **facts)

        def handle_any(self) -> None:
            url = urlsplit(self.path)
            path, query = unquote(url.path), parse_qs(url.query)
            hub.log.append(f"{self.command} {path} {self.headers.get('Range') or ''}".strip())
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            api = f"/api/{kind}s/{name}"
            if path in (api, f"{api}/revision/main", f"{api}/revision/{COMMIT}"):
                siblings = [{"rfilename": p} for p in files]
                return self.tell({"id": name, "sha": COMMIT, "private": False, "siblings": siblings})
            if path.startswith((f"{api}/tree/main", f"{api}/tree/{COMMIT}")):
                return self.tell(entries)
            if path.startswith(f"{api}/paths-info/"):
                asked = json.loads(body)["paths"] if body[:1] == b"{" else parse_qs(body.decode())["paths"]
                return self.tell([e for e in entries if e["path"] in asked])
            for revision in ("main", COMMIT):
                start = f"{place}/{name}/resolve/{revision}/"
                if path.startswith(start) and path.removeprefix(start) in files:
                    return self.file(path.removeprefix(start))
            del query
            return self.answer(404, b"{}", X_Error_Code="RepoNotFound")

        do_GET = do_HEAD = do_POST = handle_any

        def log_message(self, *_: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
