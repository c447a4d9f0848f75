"""docs/data.md shows what the commands print."""

import re
from pathlib import Path
from typing import Any

import pytest

from shardwise.cli.main import main

PAGE = Path(__file__).parents[2] / "docs" / "data.md"


def plain(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.strip().splitlines())


@pytest.mark.real_model
@pytest.mark.parametrize(
    "block", re.findall(r"```\n\$ shardwise (.*?)\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
)
def test_the_page_shows_real_output(
    block: tuple[str, str], smollm2: Path, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    command, shown = block
    monkeypatch.chdir(PAGE.parents[1])
    monkeypatch.setenv("COLUMNS", "110")
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path))
    args = command.replace("HuggingFaceTB/SmolLM2-135M-Instruct", str(smollm2)).split()
    try:
        main(args)
    except SystemExit as stop:
        assert stop.code == 2
    printed = capsys.readouterr()
    assert plain(printed.out + printed.err) == plain(shown)


def test_the_page_names_every_format_and_template() -> None:
    from shardwise.data.formats import _READERS
    from shardwise.data.templates import shipped

    text = PAGE.read_text("utf-8")
    assert all(f"`{name}`" in text for name in (*_READERS, *shipped()))
