"""Files of every kind: the same rows, each with its line; nothing unreadable is skipped."""

import bz2
import gzip
import json
import lzma
from pathlib import Path

import pytest
from data_toys import write_rows

from shardwise.data.conversations import RowProblem
from shardwise.data.formats import Chat, Pair, Text, reader_of, recognise
from shardwise.data.readers import Row, Unreadable, read_rows
from shardwise.data.sources import find_files
from shardwise.errors import DataError

ROWS = [{"prompt": "a", "completion": "b"}, {"prompt": "c", "completion": "d\ne, f"}]


def rows_of(path: Path) -> list[Row | Unreadable]:
    return [row for file in find_files(str(path))[0] for row in read_rows(file)]


def test_every_kind_of_file_gives_the_same_rows(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    lines = write_rows(tmp_path / "a.jsonl", ROWS)
    (tmp_path / "b.json").write_text(json.dumps(ROWS, indent=2))
    (tmp_path / "c.json").write_text(json.dumps({"version": 1, "data": ROWS}))
    (tmp_path / "d.json").write_bytes(lines.read_bytes())
    (tmp_path / "e.csv").write_text('prompt,completion\na,b\nc,"d\ne, f"\n')
    (tmp_path / "f.tsv").write_text('prompt\tcompletion\na\tb\nc\t"d\ne, f"\n')
    (tmp_path / "g.jsonl.gz").write_bytes(gzip.compress(lines.read_bytes()))
    (tmp_path / "h.jsonl.bz2").write_bytes(bz2.compress(lines.read_bytes()))
    (tmp_path / "i.csv.xz").write_bytes(lzma.compress((tmp_path / "e.csv").read_bytes()))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "j.parquet")
    for path in sorted(tmp_path.iterdir()):
        assert [r.value for r in rows_of(path) if isinstance(r, Row)] == ROWS, path.name
    assert [r.line for r in rows_of(tmp_path / "b.json")] == [2, 6]
    assert [r.line for r in rows_of(tmp_path / "e.csv")] == [2, 3]


def test_rows_behind_a_broken_line_are_still_read(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"text": "a"}\n{"text": \n{"text": "b"}\n')
    found = rows_of(tmp_path / "x.jsonl")
    assert [type(r).__name__ for r in found] == ["Row", "Unreadable", "Row"] and found[1].line == 2


@pytest.mark.parametrize(
    "text", ['[{"text": "a"}, {"text": ', '[{"text": "a"} {"text": "b"}]', '[{"text": "a"}] x']
)
def test_a_broken_array_is_unreadable(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.json").write_text(text)
    assert any(isinstance(r, Unreadable) for r in rows_of(tmp_path / "x.json"))


def test_csv_with_too_many_cells_and_broken_archives(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("prompt,completion\na,b,c\n")
    assert isinstance(rows_of(tmp_path / "x.csv")[0], Unreadable)
    for name in ("x.jsonl.gz", "x.parquet", "x.arrow"):
        (tmp_path / name).write_bytes(b"\x1f\x8b\x08 this is no such file")
        with pytest.raises(DataError, match=name.replace(".", r"\.")):
            rows_of(tmp_path / name)


def test_folders_globs_and_paths_that_are_not_there(tmp_path: Path) -> None:
    write_rows(tmp_path / "b.jsonl", ROWS)
    write_rows(tmp_path / "a.jsonl", ROWS)
    (tmp_path / "image.png").write_bytes(b"x")
    (tmp_path / ".hidden.jsonl").write_text("{")
    files, passed = find_files(str(tmp_path))
    assert [f.path.name for f in files] == ["a.jsonl", "b.jsonl"] and passed == ["image.png"]
    assert len(find_files(str(tmp_path / "*.jsonl"))[0]) == 2
    with pytest.raises(DataError, match="does not exist") as missing:
        find_files(str(tmp_path / "c.jsonl"))
    assert "did you mean" in missing.value.hint
    for path in (tmp_path / "image.png", tmp_path / "*.csv", tmp_path / "no" / "x.jsonl"):
        with pytest.raises(DataError):
            find_files(str(path))
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="holds no data"):
        find_files(str(tmp_path / "empty"))


def test_formats_are_recognised_by_their_fields() -> None:
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    spelt = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
    for row, name in (
        ({"messages": turns}, "messages"),
        ({"conversations": spelt}, "sharegpt"),
        ({"conversations": turns}, "messages"),
        ({"messages": json.dumps(spelt)}, "sharegpt"),
        ({"instruction": "i", "output": "o"}, "alpaca"),
        ({"question": "q", "answer": "a"}, "prompt_completion"),
        ({"prompt": "p", "chosen": "c", "rejected": "r"}, "preference"),
        ({"text": "t"}, "text"),
        ({"body": "t"}, None),
        (["text"], None),
    ):
        assert recognise(row) == name, row


def test_the_same_chat_in_every_spelling() -> None:
    expected = Chat(({"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}))
    turns = [{"role": "user", "content": [{"type": "text", "text": "q"}]}, {"role": "model", "content": "a"}]
    assert reader_of("messages")({"messages": turns}) == expected
    spelt = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
    assert reader_of("sharegpt")({"conversations": spelt}) == expected
    cut = {
        "prompt": [{"role": "user", "content": "q"}],
        "completion": [{"role": "assistant", "content": "a"}],
    }
    assert reader_of("prompt_completion")(cut) == expected
    assert reader_of("prompt_completion")({"question": "q", "answer": "a"}) == Pair("q", "a")
    assert reader_of("text")({"text": "t"}) == Text("t")
    with_system = reader_of("sharegpt")({"conversations": spelt, "system": "s"})
    assert isinstance(with_system, Chat) and with_system.messages[0] == {"role": "system", "content": "s"}
    call = [spelt[0], {"from": "function_call", "value": '{"name": "f", "arguments": {"x": 1}}'}]
    called = reader_of("sharegpt")({"conversations": call})
    assert isinstance(called, Chat)
    assert called.messages[1]["tool_calls"][0]["function"] == {"name": "f", "arguments": {"x": 1}}


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"messages": 5}, "no list of turns"),
        ({"messages": [{"role": "user", "content": {"image": "x"}}]}, "text is needed"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "part of type image"),
        ({"messages": ["hello"]}, "no object with role and content"),
        (5, "the row is a number"),
    ],
)
def test_rows_of_another_shape_are_refused_with_a_reason(row: object, reason: str) -> None:
    with pytest.raises(RowProblem, match=reason):
        reader_of("messages")(row)
