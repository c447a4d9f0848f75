"""What all pages share: templates, errors as pages, and the .json twin of every page."""

import json
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import ChoiceLoader, Environment, PackageLoader
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response

from shardwise.errors import ShardwiseError, UnknownNameError
from shardwise.report import run_html
from shardwise.report.plan_table import seconds_range, usd_range
from shardwise.runs.jsonfile import to_json

ASSETS = files("shardwise.web") / "assets"
TYPES = {".js": "text/javascript; charset=utf-8", ".css": "text/css; charset=utf-8"}


class Json(JSONResponse):
    def render(self, content: Any) -> bytes:
        return to_json(content).encode()


@cache
def environment() -> Environment:
    report = run_html.environment()
    made = report.overlay(
        loader=ChoiceLoader(
            [PackageLoader("shardwise.web"), report.loader or PackageLoader("shardwise.report")]
        )
    )
    made.globals.update(seconds_range=seconds_range, usd_range=usd_range)
    return made


def page(template: str, status: int = 200, **values: Any) -> HTMLResponse:
    return HTMLResponse(environment().get_template(template).render(**values), status)


def wants_json(request: Request) -> bool:
    """A path that ends in .json is the twin of the page without it."""
    return request.url.path.endswith(".json")


def problem(request: Request, error: Exception) -> Response:
    """What, why and hint of an error; the same words as on the command line."""
    if not isinstance(error, ShardwiseError):
        raise error
    status = 404 if isinstance(error, UnknownNameError) else 400 if error.exit_code == 2 else 500
    told: Mapping[str, str] = {"error": error.what, "why": error.why, "hint": error.hint}
    if wants_json(request) or request.method != "GET":
        return Json(told, status)
    return page("problem.html", status, told=told, here="")


async def body(request: Request, most_bytes: int = 1_000_000) -> dict[str, Any]:
    """A JSON object sent by one of our pages; an empty one for anything else."""
    try:
        found = json.loads(await received(request, most_bytes))
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


async def received(request: Request, most_bytes: int) -> bytes:
    """What was sent; nothing when it is more than that, and then the rest is not read."""
    found = bytearray()
    async for part in request.stream():
        found += part
        if len(found) > most_bytes:
            return b""
    return bytes(found)


@cache
def asset(name: str) -> tuple[bytes, str] | None:
    """A script or a style sheet, out of this room or of report's; nothing else is served as a file."""
    suffix = name[name.rfind(".") :]
    if suffix not in TYPES or "/" in name or "\\" in name:
        return None
    for folder in (ASSETS, run_html.ASSETS):
        file = folder / name
        if file.is_file():
            return file.read_bytes(), TYPES[suffix]
    return None
