"""A file -> its rows, each with the line it stands on. What cannot be read is yielded too, never skipped."""

import bz2
import csv
import gzip
import io
import json
import lzma
import re
import sys
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import IO, Any

from shardwise.data.sources import DataFile, Remote
from shardwise.errors import DataError, MissingDependencyError

TEXT_CHARACTERS = 4 * 2**20  # a longer text file is read in parts of about this many
PART = "\0part"  # marks a text that goes on in the next row; no file can have such a field name
_SURROGATE = re.compile("[\ud800-\udfff]")
_BOM = b"\xef\xbb\xbf"
_REST = "; the rest of the file cannot be read either"


@dataclass(frozen=True)
class Row:
    """`line`: 1-based line of the file (row number in Parquet). `mended`: lone surrogates became U+FFFD."""

    line: int
    value: Any
    mended: bool = False


@dataclass(frozen=True)
class Unreadable:
    """A line that is no row at all: broken JSON, or bytes that are not UTF-8."""

    line: int
    column: int
    reason: str
    excerpt: str


Lazy = Callable[[], Row | Unreadable]  # a row that is parsed when it is called for


def read_rows(file: DataFile) -> Iterator[Row | Unreadable]:
    """The rows of one file, in order. Raises DataError when the file itself cannot be opened or unpacked."""
    return (row() for row in lazy_rows(file))


def lazy_rows(file: DataFile) -> Iterator[Lazy]:
    """As `read_rows`; a row that is passed over costs no parsing, where lines tell rows apart."""
    try:
        if file.kind == "jsonl":
            yield from _jsonl(file.path)
        else:
            for row in _READERS[file.kind](file.path):
                yield partial(_same, row)
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as problem:
        raise _cannot_read(file, problem) from None
    except DataError:
        raise
    except Exception as problem:  # whatever a network library raises
        if isinstance(file.path, Remote):
            raise _cannot_read(file, problem) from None
        raise


def _cannot_read(file: DataFile, problem: Exception) -> DataError:
    return DataError(
        f"'{file.name}' cannot be read",
        getattr(problem, "strerror", None) or str(problem) or type(problem).__name__,
        "check that the file is complete and that you may read it",
    )


def _same(row: Row | Unreadable) -> Row | Unreadable:
    return row


def _source(path: Path | Remote) -> Any:
    """What libraries open themselves: a local path, or a file that is open already."""
    return path if isinstance(path, Path) else path.open("rb")


def _open(path: Path | Remote) -> IO[bytes]:
    openers: dict[str, Any] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
    opener = openers.get(path.suffix.lower())
    opened: IO[bytes] = opener(_source(path), "rb") if opener else path.open("rb")
    return opened


def _jsonl(path: Path | Remote) -> Iterator[Lazy]:
    with _open(path) as lines:
        for number, raw in enumerate(lines, 1):
            line = raw.removeprefix(_BOM).strip()  # files put together may have one in the middle
            if not line:
                continue
            if line[:1] == b"[" and number == 1:
                rest = raw.removeprefix(_BOM) + lines.read()
                yield from (partial(_same, row) for row in _array(rest))
                return
            yield partial(_json_line, number, line)


def _json_line(number: int, line: bytes) -> Row | Unreadable:
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as problem:
        return _not_utf8(number, line, problem)
    try:
        return _row(number, json.loads(text), text)
    except json.JSONDecodeError as problem:
        return Unreadable(number, problem.colno, problem.msg, _excerpt(text, problem.pos))
    except (RecursionError, ValueError) as problem:
        return Unreadable(number, 1, f"{type(problem).__name__}: {problem}"[:200], _excerpt(text, 0))


def _row(line: int, value: Any, text: str) -> Row:
    if "\\ud" in text or "\\uD" in text:
        mended = _mend(value)
        return Row(line, mended, mended != value)
    return Row(line, value)


def _mend(value: Any) -> Any:
    """Lone surrogates (half an emoji, from scraped text) are no characters: U+FFFD stands for them."""
    if isinstance(value, str):
        return _SURROGATE.sub("\ufffd", value)
    if isinstance(value, dict):
        return {_mend(k): _mend(v) for k, v in value.items()}
    return [_mend(v) for v in value] if isinstance(value, list) else value


def _not_utf8(number: int, line: bytes, problem: UnicodeDecodeError) -> Unreadable:
    around = line[max(0, problem.start - 20) : problem.start + 20].decode("utf-8", "replace")
    reason = f"byte 0x{line[problem.start]:02x} is not UTF-8"
    if line[:2] in (b"\xff\xfe", b"\xfe\xff") or b"\0" in line[:64]:
        reason += " (the file looks like UTF-16: iconv -f UTF-16 -t UTF-8)"
    return Unreadable(number, problem.start + 1, reason, around)


def _excerpt(text: str, at: int) -> str:
    first = max(0, at - 30)
    return ("..." if first else "") + text[first : at + 30] + ("..." if at + 30 < len(text) else "")


def _json(path: Path | Remote) -> Iterator[Row | Unreadable]:
    """An array of rows, an object with one array in it, or, in spite of its name, JSON lines."""
    with _open(path) as file:
        raw = file.read()
    raw = raw.removeprefix(_BOM)
    if raw.lstrip()[:1] == b"[":
        yield from _array(raw)
        return
    try:
        value = json.loads(raw)
    except ValueError:
        for number, line in enumerate(raw.splitlines(), 1):
            if line.strip():
                yield _json_line(number, line.strip())
        return
    lists = [v for v in value.values() if isinstance(v, list)] if isinstance(value, dict) else []
    one_row = isinstance(value, dict) and any(
        k in value for k in ("messages", "conversations", "prompt", "instruction", "text", "chosen")
    )
    if len(lists) == 1 and not one_row:
        for number, item in enumerate(lists[0], 1):
            yield Row(number, _mend(item))
    else:
        yield Row(1, _mend(value))


def _array(raw: bytes) -> Iterator[Row | Unreadable]:
    """The elements of a JSON array, each with the line it begins on."""
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as problem:
        line = raw.count(b"\n", 0, problem.start) + 1
        yield Unreadable(line, 1, f"byte 0x{raw[problem.start]:02x} is not UTF-8", "")
        return
    decoder = json.JSONDecoder()
    white = re.compile(r"\s*")
    at, line, counted = white.match(text, text.index("[") + 1).end(), 1, 0  # type: ignore[union-attr]
    while at < len(text):
        if text[at] == "]":
            after = white.match(text, at + 1)
            if after and after.end() < len(text):
                yield _broken(text, after.end(), "text after the end of the array")
            return
        line += text.count("\n", counted, at)
        counted = at
        try:
            value, end = decoder.raw_decode(text, at)
        except (json.JSONDecodeError, RecursionError) as problem:
            yield _broken(text, getattr(problem, "pos", at), getattr(problem, "msg", "nested too deeply"))
            return
        yield _row(line, value, text[at:end])
        at = white.match(text, end).end()  # type: ignore[union-attr]
        if text[at : at + 1] == ",":
            at = white.match(text, at + 1).end()  # type: ignore[union-attr]
        elif text[at : at + 1] != "]":
            yield _broken(text, at, "expecting ',' or ']'")
            return
    yield _broken(text, len(text), "the array has no end")


def _broken(text: str, at: int, reason: str) -> Unreadable:
    line = text.count("\n", 0, at) + 1
    return Unreadable(line, at - text.rfind("\n", 0, at), reason + _REST, _excerpt(text, at))


def _csv(path: Path | Remote) -> Iterator[Row | Unreadable]:
    """Rows with the header's names as fields; a blank cell is no value."""
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))
    inner = Path(path.stem) if path.suffix.lower() in (".gz", ".bz2", ".xz") else path
    delimiter = "\t" if inner.suffix.lower() == ".tsv" else ","
    with _open(path) as raw:
        text = io.TextIOWrapper(raw, encoding="utf-8-sig", newline="")
        try:
            first = text.readline()
        except UnicodeDecodeError as problem:
            yield Unreadable(1, 1, f"a byte of the file is not UTF-8 ({problem.reason}){_REST}", "")
            return
        if delimiter not in first:  # as spreadsheets write it where the comma is for decimals
            delimiter = next((d for d in ";\t" if d in first), delimiter)
        rows = csv.reader(chain([first], text), delimiter=delimiter, strict=True)
        header: list[str] | None = None
        before = 0
        while True:
            try:
                cells = next(rows)
            except StopIteration:
                return
            except csv.Error as problem:
                yield Unreadable(before + 1, 1, f"{problem}{_REST}", "")
                return
            except UnicodeDecodeError as problem:
                yield Unreadable(
                    before + 1, 1, f"a byte after this line is not UTF-8 ({problem.reason}){_REST}", ""
                )
                return
            line, before = before + 1, rows.line_num
            if not any(cells):
                continue
            if header is None:
                header = [cell.strip() for cell in cells]
            elif len(cells) > len(header):
                yield Unreadable(
                    line, 1, f"{len(cells)} cells under {len(header)} columns", ",".join(cells)[:60]
                )
            else:
                yield Row(
                    line,
                    {k: c for k, c in zip(header, cells, strict=False) if c != ""} | _blank(header, cells),
                )


def _blank(header: list[str], cells: list[str]) -> dict[str, None]:
    return {k: None for i, k in enumerate(header) if i >= len(cells) or cells[i] == ""}


def _arrow_module() -> Any:
    try:
        import pyarrow
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError:
        raise MissingDependencyError(
            "Parquet and Arrow files need pyarrow", "it is not installed", "pip install 'shardwise[data]'"
        ) from None
    return pyarrow


def _parquet(path: Path | Remote) -> Iterator[Row | Unreadable]:
    pyarrow = _arrow_module()
    try:
        yield from _batches(pyarrow.parquet.ParquetFile(_source(path)).iter_batches(batch_size=1024))
    except (pyarrow.ArrowInvalid, pyarrow.ArrowNotImplementedError) as problem:
        raise DataError(
            f"'{path}' is no Parquet file", str(problem).splitlines()[0], "write it again"
        ) from None


def _arrow(path: Path | Remote) -> Iterator[Row | Unreadable]:
    pyarrow = _arrow_module()
    try:
        with pyarrow.memory_map(str(path)) if isinstance(path, Path) else path.open("rb") as source:
            try:
                batches = pyarrow.ipc.open_stream(source)
            except pyarrow.ArrowInvalid:
                file = pyarrow.ipc.open_file(source)
                batches = (file.get_batch(i) for i in range(file.num_record_batches))
            yield from _batches(batches)
    except pyarrow.ArrowInvalid as problem:
        raise DataError(
            f"'{path}' is no Arrow file", str(problem).splitlines()[0], "write it again"
        ) from None


def _batches(batches: Any) -> Iterator[Row]:
    number = 0
    for batch in batches:
        for value in batch.to_pylist():
            number += 1
            yield Row(number, {k: _without_nulls(v) for k, v in value.items()})


def _without_nulls(value: Any) -> Any:
    """Arrow gives every object of a column the fields of all others, as nulls: take those out again."""
    if isinstance(value, dict):
        return {k: _without_nulls(v) for k, v in value.items() if v is not None or k == "content"}
    return [_without_nulls(v) for v in value] if isinstance(value, list) else value


def _text(path: Path | Remote) -> Iterator[Row | Unreadable]:
    """A text file is one document; a very long one is read in parts that end with a line."""
    line = 1
    with _open(path) as raw:
        text = io.TextIOWrapper(raw, encoding="utf-8-sig", newline="")  # line ends stay as they are
        try:
            part = text.read(TEXT_CHARACTERS)
            while part:
                part += text.readline()
                after = text.read(TEXT_CHARACTERS)
                if part.strip():
                    yield Row(line, {"text": part} if not after else {"text": part, PART: True})
                line += part.count("\n")
                part = after
        except UnicodeDecodeError as problem:
            yield Unreadable(line, 1, f"a byte after this line is not UTF-8 ({problem.reason}){_REST}", "")


_READERS: dict[str, Callable[[Path | Remote], Iterator[Row | Unreadable]]] = {
    "json": _json,
    "csv": _csv,
    "parquet": _parquet,
    "arrow": _arrow,
    "text": _text,
}
