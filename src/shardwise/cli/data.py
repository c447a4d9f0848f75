"""`shardwise data`: look at a data set before training on it."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from shardwise.recipe.schema import Data


@click.group()
def data() -> None:
    """Check a data set before training on it."""


@data.command()
@click.argument("sources", nargs=-1, required=True, metavar="SOURCE...")
@click.option("--model", "-m", required=True, help="Whose tokenizer and chat template: a folder or a hub id.")
@click.option("--revision", help="Hub revision of the model.")
@click.option("--format", "form", default="auto", show_default=True, help="How rows are read.")
@click.option("--validation", help="Held-out rows: a count (100), a share (0.05), or a file.")
@click.option("--sequence-length", type=int, help="Tokens in one packed sequence; default: chosen.")
@click.option(
    "--overlong", type=click.Choice(["truncate", "drop", "refuse"]), default="truncate", show_default=True
)
@click.option("--train-on", type=click.Choice(["assistant", "all"]), default="assistant", show_default=True)
@click.option("--no-packing", is_flag=True, help="One row per sequence.")
@click.option(
    "--streaming", is_flag=True, help="Look at the first rows of each source only; fetch and keep nothing."
)
@click.option("--chat-template", help="A Jinja file, or chatml, gemma, llama3, mistral, qwen, zephyr.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of the split.")
@click.option("--rows", type=click.IntRange(min=0), default=3, show_default=True, help="Rows to show.")
@click.option(
    "--cache", type=click.Path(path_type=Path, file_okay=False), help="Where prepared rows are kept."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--html", type=click.Path(path_type=Path, dir_okay=False), help="Write the report in one file.")
def check(
    sources: tuple[str, ...],
    model: str,
    revision: str | None,
    form: str,
    validation: str | None,
    sequence_length: int | None,
    overlong: str,
    train_on: str,
    no_packing: bool,
    streaming: bool,
    chat_template: str | None,
    seed: int,
    rows: int,
    cache: Path | None,
    as_json: bool,
    html: Path | None,
) -> None:
    """Rows, formats, lengths, labels, cuts, duplicates: what is in SOURCE, and what training would see.

    SOURCE is a file (jsonl, json, csv, parquet, arrow, txt; also gz, bz2, xz), a folder, a glob or a hub
    dataset id.
    """
    from shardwise.data.check import check as run_check
    from shardwise.data.check import check_pairs, preference_parts
    from shardwise.data.show import check_text, pairs_text

    settings = {
        "train": [{"path": path, "format": form} for path in sources],
        "overlong": overlong,
        "train_on": train_on,
        "packing": not no_packing,
        "streaming": streaming,
    }
    if sequence_length is not None:
        settings["sequence_length"] = sequence_length
    if validation is not None:
        settings["validation"] = _number(validation)
    wanted = _data(settings)
    pairs = preference_parts(wanted)
    if pairs:
        found = check_pairs(pairs)
        if html is not None:
            from shardwise.cli.files import write_page
            from shardwise.data.page import pairs_html

            write_page(html, pairs_html(found))
        if as_json or html is None:
            _print(found.to_dict() if as_json else pairs_text(found), as_json)
        return
    shape = _shape(model, revision)
    with _Progress(not as_json) as progress:
        result = run_check(
            wanted,
            model,
            revision=revision,
            chat_template=chat_template,
            max_length=shape.get("max_position_embeddings"),
            vocabulary=shape.get("vocab_size"),
            seed=seed,
            cache=cache,
            rows=rows,
            progress=progress,
        )
    if html is not None:
        from shardwise.cli.files import write_page
        from shardwise.data.page import check_html

        write_page(html, check_html(result))
    if as_json or html is None:
        _print(result.to_dict() if as_json else check_text(result), as_json)


def _data(settings: dict[str, Any]) -> "Data":
    """Flags through the door of the recipe, so that both refuse the same things in the same words."""
    from io import StringIO

    from ruamel.yaml import YAML

    from shardwise.errors import RecipeError
    from shardwise.recipe.load import parse_recipe

    text = StringIO()
    tree = {"model": "-", "data": settings, "training": {"max_steps": 1}}  # a stream needs an end
    YAML().dump(tree, text)
    try:
        return parse_recipe(text.getvalue(), "command line").data
    except RecipeError as problem:  # the lines of a file that nobody wrote say nothing
        what, why = (
            re.sub(r"command line, line \d+", "command line", t) for t in (problem.what, problem.why)
        )
        raise RecipeError(what, why, problem.hint) from None


def _number(text: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _shape(model: str, revision: str | None) -> dict[str, Any]:
    """max_position_embeddings and vocab_size, where the model's config is at hand."""
    from shardwise.data.tokenizer import tokenizer_folder

    path = tokenizer_folder(model, revision) / "config.json"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    inner = found.get("text_config", found)
    return inner if isinstance(inner, dict) else {}


def _print(what: Any, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(what, indent=2, ensure_ascii=False))
        return
    from rich.console import Console

    Console(highlight=False).print(what)


class _Progress:
    """A bar on stderr, when a person looks at it."""

    def __init__(self, wanted: bool) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        console = Console(stderr=True)
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not (wanted and console.is_terminal),
        )
        self._tasks: dict[str, Any] = {}

    def __enter__(self) -> Callable[[str, int, int | None], None]:
        self._bar.start()
        return self._advance

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def _advance(self, phase: str, done: int, total: int | None) -> None:
        if phase not in self._tasks:
            self._tasks[phase] = self._bar.add_task(phase, total=total)
        self._bar.update(self._tasks[phase], completed=done, total=total)
