"""`shardwise runs` and `shardwise show`: what was trained here."""

from pathlib import Path

import click

FOLDER = click.option(
    "--folder",
    default="runs",
    show_default=True,
    type=click.Path(path_type=Path),
    help="Where run folders are.",
)
JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@click.command()
@FOLDER
@JSON
def runs(folder: Path, as_json: bool) -> None:
    """List runs, newest first."""
    from shardwise.report.run_json import run_row
    from shardwise.report.run_view import view_run
    from shardwise.runs import Course, list_runs
    from shardwise.runs.jsonfile import to_json

    # a finished run's summary says it all; its events, perhaps a hundred thousand, are left unread
    views = [view_run(run, 1, Course(run) if run.summary() else None) for run in list_runs(folder)]
    if as_json:
        click.echo(to_json([run_row(view) for view in views], indent=2))
    elif not views:
        click.echo(f"no runs in '{folder}'\n hint: make one: shardwise train RECIPE.yaml", err=True)
    else:
        from rich.console import Console

        from shardwise.report.run_text import runs_text

        Console(soft_wrap=False).print(runs_text(views))


@click.command()
@click.argument("run")
@FOLDER
@JSON
@click.option("--html", type=click.Path(path_type=Path, dir_okay=False), help="Write a report in one file.")
def show(run: str, folder: Path, as_json: bool, html: Path | None) -> None:
    """Show RUN (a name, the beginning of one, a path, or 'latest'): estimate against measurement."""
    from shardwise.report.run_view import view_run
    from shardwise.runs import open_run
    from shardwise.runs.jsonfile import to_json

    view = view_run(open_run(run, folder))
    if html is not None:
        from shardwise.cli.files import write_page
        from shardwise.report.run_html import run_html

        write_page(html, run_html(view))
    if as_json:
        from shardwise.report.run_json import run_json

        click.echo(to_json(run_json(view), indent=2))
    elif html is None:
        from rich.console import Console

        from shardwise.report.run_text import print_run

        print_run(Console(highlight=False), view)
