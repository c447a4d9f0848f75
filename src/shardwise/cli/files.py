"""Files that a person asked for by name."""

from pathlib import Path

import click

from shardwise.errors import UsageError


def write_page(path: Path, html: str) -> None:
    """Write an HTML report in one move and say so. Raises UsageError when it cannot be written."""
    from shardwise.runs.jsonfile import write_text

    try:
        write_text(path, html)
    except OSError as problem:
        raise UsageError(
            f"'{path}' cannot be written",
            problem.strerror or str(problem),
            "name a file in a folder that exists",
        ) from None
    click.echo(f"wrote {path}", err=True)
