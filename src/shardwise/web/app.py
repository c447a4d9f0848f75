"""The application: every route in one list, behind the guard."""

import asyncio
import hmac
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from urllib.parse import parse_qs

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route

from shardwise.errors import ShardwiseError, UnknownNameError
from shardwise.web.data_pages import DataPages
from shardwise.web.guard import Access, Guard
from shardwise.web.jobs import Jobs
from shardwise.web.library import Library
from shardwise.web.pages import asset, page, problem, received
from shardwise.web.plan_pages import PlanPages
from shardwise.web.runs_pages import RunsPages


def create_app(library: Library, access: Access) -> Starlette:
    """The page over the runs of `library`, reached as `access` says."""
    return Starlette(
        routes=[
            Route("/", lambda request: RedirectResponse("/plan", 303)),
            Route("/assets/{name}", _asset),
            Route("/login", _login_page),
            Route("/login", _login(access), methods=["POST"]),
            *DataPages(library).routes(),
            *PlanPages(library).routes(),
            *RunsPages(library, Jobs(library.folder)).routes(),
        ],
        middleware=[Middleware(Guard, access=access), Middleware(GZipMiddleware, minimum_size=2000)],
        exception_handlers={ShardwiseError: problem, HTTPException: _http_problem},
    )


def _http_problem(request: Request, error: Exception) -> Response:
    code = error.status_code if isinstance(error, HTTPException) else 500
    if code == 404:
        return problem(
            request, UnknownNameError("there is no such page", f"nothing lies at {request.url.path[:200]}")
        )
    return PlainTextResponse(f"{HTTPStatus(code).phrase}\n", code)


def _asset(request: Request) -> Response:
    found = asset(request.path_params["name"])
    if found is None:
        return PlainTextResponse("not found\n", 404)
    return Response(found[0], media_type=found[1])


def _login_page(request: Request) -> Response:
    return page("login.html", here="", wrong=False)


def _login(access: Access) -> Callable[[Request], Awaitable[Response]]:
    async def login(request: Request) -> Response:
        sent = parse_qs((await received(request, 4096)).decode("utf-8", "replace"))
        given = sent.get("password", [""])[0]
        if not access.password or not hmac.compare_digest(given.encode(), access.password.encode()):
            await asyncio.sleep(1.0)  # guessing takes time
            return page("login.html", 401, here="", wrong=True)
        answer = RedirectResponse("/plan", 303)
        answer.set_cookie(access.cookie, access.token, httponly=True, samesite="lax", path="/")
        return answer

    return login
