"""Who may talk to the page: every request, reads too, passes here before any route sees it.

Loopback alone is no protection: any web site a person visits can send requests to it, and a name that resolves to
127.0.0.1 (DNS rebinding) makes them same-origin. So the Host must be a name of ours, the Origin (where a browser
tells one) too, and every request carries the token, in a cookie, a header or once in the address.
"""

import hmac
import ipaddress
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from urllib.parse import urlencode, urlsplit

from starlette.datastructures import URL, MutableHeaders
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shardwise.errors import UsageError

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; form-action 'self'; frame-ancestors 'none'; base-uri 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
LOGIN_STYLES = ("/assets/shardwise.css", "/assets/web.css")  # of the package, the same for everybody
WILDCARDS = ("0.0.0.0", "::", "")
LOOPBACK_NAMES = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True)
class Access:
    """Where the page listens and by which names and secrets it is reached."""

    host: str
    port: int
    token: str = field(default_factory=lambda: secrets.token_urlsafe(24), repr=False)
    password: str | None = field(default=None, repr=False)
    names: tuple[str, ...] = ()  # Host names allowed beside those of loopback

    @property
    def cookie(self) -> str:
        """Browsers share cookies between the ports of a host; the port keeps two pages apart."""
        return f"shardwise-{self.port}"

    @property
    def address(self) -> str:
        host = self.names[0] if self.host in WILDCARDS and self.names else self.host
        name = f"[{host}]" if ":" in host else host
        return f"http://{name}:{self.port}/?{urlencode({'token': self.token})}"


def check_bind(host: str, password: str | None) -> None:
    """Raises UsageError for an address others can reach, unless a password was set."""
    if is_loopback(host) or password:
        return
    raise UsageError(
        f"--host {host} would open the page to other machines without a password",
        "whoever reaches it could read your runs and start programs as you",
        "leave out --host and use: ssh -L 8707:127.0.0.1:8707 THIS_MACHINE (or set SHARDWISE_WEB_PASSWORD)",
    )


def is_loopback(host: str) -> bool:
    if host.casefold() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


class Guard:
    """ASGI middleware. Refusals say nothing about what lies behind."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self.app, self.access = app, access
        bound = () if access.host in WILDCARDS else (access.host,)
        names = (*LOOPBACK_NAMES, *bound, *access.names)
        self.hosts = {
            f"[{n}]:{access.port}" if ":" in n else f"{n}:{access.port}" for n in map(str.casefold, names)
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":  # no websockets here
            return
        request = Request(scope)
        answer = self._refusal(request) or self._login(request)
        if answer is not None:
            for name, value in HEADERS.items():
                answer.headers[name] = value
            await answer(scope, receive, send)
            return
        await self.app(scope, receive, _with_headers(send))

    def _refusal(self, request: Request) -> Response | None:
        hosts = request.headers.getlist("host")
        if len(hosts) != 1 or hosts[0].casefold() not in self.hosts:
            return PlainTextResponse("refused: unknown Host\n", 421)
        origin = request.headers.get("origin")
        if origin is not None and not self._is_ours(origin):
            return PlainTextResponse("refused: foreign Origin\n", 403)
        site = request.headers.get("sec-fetch-site")
        changes = request.method not in ("GET", "HEAD")
        if changes and site is not None and site not in ("same-origin", "none"):
            return PlainTextResponse("refused: sent by another site\n", 403)
        # A cookie travels by itself; what changes something must also show that one of our pages sent it.
        if changes and origin is None and not self._bearer(request):
            return PlainTextResponse("refused: no Origin\n", 403)
        return None

    def _is_ours(self, origin: str) -> bool:
        parts = urlsplit(origin)
        return parts.scheme in ("http", "https") and parts.netloc.casefold() in self.hosts

    def _bearer(self, request: Request) -> bool:
        kind, _, given = request.headers.get("authorization", "").partition(" ")
        return kind.casefold() == "bearer" and self._right(given)

    def _right(self, given: str | None) -> bool:
        return given is not None and hmac.compare_digest(given.encode(), self.access.token.encode())

    def _login(self, request: Request) -> Response | None:
        """None when the request carries the token; a move to the clean address when it came in the address."""
        given = request.query_params.get("token")
        if given is not None and self._right(given) and request.method == "GET":
            clean = URL(scope=request.scope).remove_query_params("token")
            answer = RedirectResponse(clean.path + (f"?{clean.query}" if clean.query else ""), 303)
            self.welcome(answer)
            return answer
        if self._bearer(request) or self._right(request.cookies.get(self.access.cookie)):
            return None
        if self.access.password and request.url.path in ("/login", *LOGIN_STYLES):
            return None
        if (
            self.access.password
            and request.method == "GET"
            and "text/html" in request.headers.get("accept", "")
        ):
            return RedirectResponse("/login", 303)
        return PlainTextResponse(
            "refused: open the address that `shardwise web` printed, with its token\n", 401
        )

    def welcome(self, answer: Response) -> None:
        answer.set_cookie(self.access.cookie, self.access.token, httponly=True, samesite="lax", path="/")


def _with_headers(send: Send) -> Callable[[Message], Awaitable[None]]:
    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            for name, value in HEADERS.items():
                headers.setdefault(name, value)
        await send(message)

    return sending
