"""Who may talk to the page. Every request here is a real one over a socket."""

import http.client
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from served_page import TOKEN, Page

from shardwise.errors import UsageError
from shardwise.web.app import create_app
from shardwise.web.guard import Access, check_bind, is_loopback
from shardwise.web.library import Library

BEARER = {"Authorization": f"Bearer {TOKEN}"}


def ask(
    site: Page, path: str, method: str = "GET", headers: dict[str, str] | None = None, body: str = ""
) -> tuple[int, dict[str, str], str]:
    connection = http.client.HTTPConnection("127.0.0.1", site.port, timeout=20)
    sent = {"Host": f"127.0.0.1:{site.port}", **(headers or {})}
    connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
    for name, value in {**sent, "Content-Length": str(len(body))}.items():
        connection.putheader(name, value)
    connection.endheaders(body.encode())
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, {k.lower(): v for k, v in answer.getheaders()}, text


def every_path(site: Page) -> list[str]:
    """Every route of the application with its parameters filled in."""
    routes = create_app(site.library, Access("127.0.0.1", 1)).routes
    fill = {"{name}": "first"}
    paths = [re.sub(r"\{\w+\}", lambda m: fill.get(m[0], "x"), r.path) for r in routes]  # type: ignore[attr-defined]
    return [*paths, "/assets/charts.js", "/runs/first/log.json?name=rank-0.log", "/nothing/here"]


def test_s05_no_route_answers_without_the_token(site: Page) -> None:
    paths = every_path(site)
    assert len(paths) > 12
    for path in paths:
        status, _, text = ask(site, path)
        assert status == 401, path
        assert "first" not in text and "loss" not in text, path


@pytest.mark.parametrize(
    "headers",
    [
        {"Authorization": "Bearer wrong"},
        {"Authorization": f"Basic {TOKEN}"},
        {"Cookie": "shardwise=wrong"},
        {"Authorization": f"Bearer {TOKEN[:-1]}"},
        {"Authorization": "Bearer "},
    ],
)
def test_s05_no_route_answers_to_a_wrong_token(site: Page, headers: dict[str, str]) -> None:
    for path in every_path(site):
        assert ask(site, path, headers=headers)[0] == 401, path
    assert ask(site, "/runs?token=wrong")[0] == 401


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:{port}", "127.0.0.1", "127.0.0.1:1", "0.0.0.0:{port}", ""]
)
def test_s05_another_host_header_is_refused_even_with_the_token(site: Page, host: str) -> None:
    named = {**BEARER, "Host": host.format(port=site.port)}
    for path in ("/runs", "/runs.json", f"/runs?token={TOKEN}", "/assets/charts.js"):
        assert ask(site, path, headers=named)[0] == 421, path


@pytest.mark.parametrize("name", ["localhost", "127.0.0.1", "[::1]"])
def test_names_of_loopback_are_ours(site: Page, name: str) -> None:
    assert ask(site, "/runs.json", headers={**BEARER, "Host": f"{name}:{site.port}"})[0] == 200


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://127.0.0.1:1", "file://"])
def test_s05_another_origin_is_refused_even_with_the_token(site: Page, origin: str) -> None:
    for method, path in (("GET", "/runs.json"), ("POST", "/start/check"), ("POST", "/runs/first/stop")):
        assert ask(site, path, method, {**BEARER, "Origin": origin})[0] == 403, path


def test_a_change_by_cookie_alone_needs_an_origin_of_ours(site: Page) -> None:
    cookie = {"Cookie": f"{site.access.cookie}={TOKEN}"}
    assert ask(site, "/runs.json", headers=cookie)[0] == 200
    assert ask(site, "/runs/first/stop", "POST", cookie)[0] == 403
    assert (
        ask(
            site,
            "/runs/first/stop",
            "POST",
            {**cookie, "Origin": site.address, "Sec-Fetch-Site": "cross-site"},
        )[0]
        == 403
    )
    status, _, text = ask(site, "/runs/first/stop", "POST", {**cookie, "Origin": site.address})
    assert status == 400 and "not at work" in json.loads(text)["error"]


def test_token_in_the_address_becomes_a_cookie_and_leaves_the_address(site: Page) -> None:
    status, headers, _ = ask(site, f"/compare?run=first&token={TOKEN}&run=second")
    assert status == 303 and headers["location"] == "/compare?run=first&run=second"
    cookie = headers["set-cookie"]
    assert "HttpOnly" in cookie and "samesite=lax" in cookie.lower()
    assert ask(site, "/runs", headers={"Cookie": cookie.split(";")[0]})[0] == 200


def test_every_answer_forbids_foreign_scripts_frames_and_caches(site: Page) -> None:
    for headers in (BEARER, {}):
        _, told, _ = ask(site, "/runs", headers=headers)
        assert "default-src 'none'" in told["content-security-policy"]
        assert "unsafe-inline" not in told["content-security-policy"]
        assert told["x-content-type-options"] == "nosniff" and told["cache-control"] == "no-store"


def test_s05_public_bind_without_a_password_is_refused() -> None:
    for host in ("0.0.0.0", "::", "192.168.1.5", "example.org"):
        with pytest.raises(UsageError, match="without a password"):
            check_bind(host, None)
        check_bind(host, "long enough")
    for host in ("127.0.0.1", "localhost", "::1", "127.5.5.5"):
        check_bind(host, None)
        assert is_loopback(host)


def test_s05_command_refuses_a_public_bind_and_listens_nowhere(tmp_path: Path) -> None:
    code = (
        "from shardwise.cli.web import web; from shardwise.errors import UsageError\n"
        "try: web.main(['--host', '0.0.0.0', '--port', '0'], standalone_mode=False)\n"
        "except UsageError as e: print(e); raise SystemExit(e.exit_code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=60,
        env={"PATH": "/usr/bin"},
    )
    assert done.returncode == 2 and "ssh -L" in done.stdout


def test_password_opens_the_page_and_a_wrong_one_does_not(made: Path) -> None:
    site = Page(Library(made), password="correct horse")
    try:
        ours = {"Origin": site.address, "Content-Type": "application/x-www-form-urlencoded"}
        assert ask(site, "/runs", headers={"Accept": "text/html"})[1]["location"] == "/login"
        assert ask(site, "/runs.json")[0] == 401
        assert ask(site, "/login", "POST", ours, "password=wrong")[0] == 401
        assert (
            ask(site, "/login", "POST", {**ours, "Origin": "http://evil.example"}, "password=correct+horse")[
                0
            ]
            == 403
        )
        status, headers, _ = ask(site, "/login", "POST", ours, "password=correct+horse")
        assert status == 303
        assert ask(site, "/runs.json", headers={"Cookie": headers["set-cookie"].split(";")[0]})[0] == 200
    finally:
        site.close()


@pytest.mark.parametrize(
    "path",
    [
        "/runs/..",
        "/runs/../../etc/passwd",
        "/runs/%2e%2e%2fsecret",
        "/runs/..%2f..%2fetc%2fpasswd.json",
        "/runs/.web",
        "/runs/link",
        "/runs/link.json",
        "/runs/first/log.json?name=../recipe.yaml",
        "/runs/first/log.json?name=/etc/passwd",
        "/runs/first/log.json?name=out.log",
        "/assets/..%2fapp.py",
        "/assets/app.py",
        "/assets/../guard.py",
        "/compare?run=../first",
        "/start?from=../../etc",
        "/runs/%00",
    ],
)
def test_nothing_outside_the_run_folders_is_served(site: Page, path: str) -> None:
    folder = site.library.folder
    secret = folder.parent / "secret"
    if not secret.exists():
        for name in ("recipe.yaml", "status.json"):
            secret.mkdir(exist_ok=True)
            (secret / name).write_text("SECRET")
        (folder / "link").symlink_to(secret)
        logs = folder / "first" / "logs"
        logs.mkdir()
        (logs / "out.log").symlink_to(secret / "recipe.yaml")
    status, _, text = ask(site, path, headers=BEARER)
    assert status == 404, path
    assert "SECRET" not in text and "root:" not in text
