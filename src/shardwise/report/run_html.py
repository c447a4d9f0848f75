"""A run as one HTML file that stands alone: no request leaves it, other people's text cannot act in it."""

import base64
import hashlib
from functools import cache
from importlib.resources import files

from jinja2 import Environment, PackageLoader, StrictUndefined

from shardwise import __version__
from shardwise.report import numbers
from shardwise.report.bars import Bar, bar, term_number
from shardwise.report.run_json import run_json
from shardwise.report.run_view import RunView

ASSETS = files("shardwise.report") / "assets"
SCRIPTS = ("uplot.js", "charts.js", "run.js")
STYLES = ("uplot.css", "shardwise.css")


@cache
def asset(name: str) -> str:
    return (ASSETS / name).read_text(encoding="utf-8")


@cache
def environment() -> Environment:
    """Templates of this room; every value is escaped, a missing one is an error."""
    made = Environment(
        loader=PackageLoader("shardwise.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.globals["number"] = numbers
    made.globals["term_number"] = term_number
    made.globals["version"] = __version__
    return made


def run_html(view: RunView) -> str:
    """The whole report. Its policy allows only the scripts it came with, told by their hashes."""
    scripts = [asset(name) for name in SCRIPTS]
    template = environment().get_template("report.html")
    return template.render(
        view=view,
        bars=run_bars(view),
        data=run_json(view),
        scripts=scripts,
        styles=[asset(name) for name in STYLES],
        script_hashes=[script_hash(text) for text in scripts],
    )


def script_hash(text: str) -> str:
    """As a Content-Security-Policy names an inline script."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def run_bars(view: RunView) -> tuple[Bar, ...]:
    """Estimate over measured, on one scale; none where nothing is known by term."""
    terms = [r for r in view.memory if not r.name.startswith("peak ")]
    said = [(r.name, r.estimate or 0.0) for r in terms]
    found = [(r.name, r.measured or 0.0) for r in terms]
    whole = max(sum(b for _, b in said), sum(b for _, b in found))
    bars = (bar("estimate", said, whole), bar("measured", found, whole))
    return tuple(b for b in bars if b.segments)
