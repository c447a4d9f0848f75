"""`shardwise accuracy`: the estimates against a table of measured runs."""

import json

import click


@click.command()
@click.argument("file", type=click.Path())
@click.option("--subset", help="Only rows whose column 'subset' says this.")
@click.option("--worst", type=click.IntRange(0), default=10, show_default=True, help="Rows furthest off.")
@click.option("--json", "as_json", is_flag=True, help="The score and every row as JSON.")
def accuracy(file: str, subset: str | None, worst: int, as_json: bool) -> None:
    """Score memory and throughput estimates against FILE.csv, one measured run per line.

    Columns are described in docs/accuracy.md. Rows that ask for what is not estimated are declined, with the
    reason.
    """
    from shardwise.errors import unknown_name
    from shardwise.plan.accuracy import score_memory, score_throughput
    from shardwise.plan.rows import read_rows
    from shardwise.report.accuracy_text import accuracy_json, accuracy_text

    rows = read_rows(file)
    if subset is not None:
        known = {row.text("subset") for row in rows}
        if subset not in known:
            raise unknown_name("subset", subset, known)
        rows = [row for row in rows if row.text("subset") == subset]
    memory, throughput = score_memory(rows), score_throughput(rows)
    if as_json:
        click.echo(json.dumps(accuracy_json(memory, throughput), indent=1))
    else:
        click.echo(accuracy_text(memory, throughput, worst), nl=False)
