"""A check of data as one HTML file that stands alone; text of rows is escaped and cannot act."""

from io import StringIO

from jinja2 import Environment, PackageLoader, StrictUndefined

from shardwise import __version__
from shardwise.data.check import Check, PairCheck
from shardwise.data.show import facts, pairs_text, places


def check_html(check: Check) -> str:
    """The report of the terminal, with all findings and the samples."""
    report = check.report
    environment = Environment(
        loader=PackageLoader("shardwise.data", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
    )
    named = (
        ("Refused rows", report.refused),
        ("Dropped rows", report.dropped),
        ("Used, with a remark", report.notes),
    )
    return environment.get_template("page.html").render(
        report=report,
        names=", ".join(f.name for f in report.files[:3]),
        facts=facts(check),
        findings=[(title, [(f, places(f, 20)) for f in found]) for title, found in named],
        most=max((count for _, _, count in report.lengths.histogram), default=1),
        samples=check.samples,
        version=__version__,
    )


def pairs_html(check: PairCheck) -> str:
    """What the terminal shows of preference pairs, as a page."""
    from rich.console import Console

    console = Console(record=True, file=StringIO(), width=110)
    console.print(pairs_text(check))
    return console.export_html(inline_styles=True)
