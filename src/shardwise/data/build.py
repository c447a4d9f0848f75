"""Files -> a finished store: read, recognise, encode, write; goes on where a broken-off preparation stopped."""

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from shardwise.data.conversations import RowProblem
from shardwise.data.encode import Encoded, Encoder
from shardwise.data.formats import Example, Preference, reader_of, recognise, unrecognised
from shardwise.data.readers import Row, Unreadable, read_rows
from shardwise.data.sources import DataFile, find_files
from shardwise.data.store import Store, Writer, open_store
from shardwise.errors import DataError

BATCH = 512  # rows encoded together
JOURNAL_SECONDS = 2.0
EXAMPLES = 20  # places kept for each reason
_PEEK = 200

Progress = Callable[[str, int, int | None], None]


@dataclass(frozen=True)
class Part:
    """The files of one source of a recipe, all of one format."""

    path: str
    files: tuple[DataFile, ...]
    format: str
    passed_over: tuple[str, ...] = ()


@dataclass
class Tally:
    """How often something happened, and where first: (file, line)."""

    count: int = 0
    places: list[tuple[str, int]] = field(default_factory=list)

    def add(self, file: str, line: int) -> None:
        self.count += 1
        if len(self.places) < EXAMPLES:
            self.places.append((file, line))


@dataclass
class Account:
    """What reading found. rows_read = rows in the store + refused."""

    rows_read: dict[str, int] = field(default_factory=dict)  # by file
    refused: dict[str, Tally] = field(default_factory=dict)  # by reason
    notes: dict[str, Tally] = field(default_factory=dict)
    largest_id: int = -1
    with_system: int = 0
    chats: int = 0

    def refuse(self, reason: str, file: str, line: int) -> None:
        self.refused.setdefault(reason, Tally()).add(file, line)

    def note(self, text: str, file: str, line: int) -> None:
        self.notes.setdefault(text, Tally()).add(file, line)

    @classmethod
    def load(cls, tree: dict[str, Any]) -> "Account":
        def tallies(found: dict[str, Any]) -> dict[str, Tally]:
            return {k: Tally(v["count"], [(f, n) for f, n in v["places"]]) for k, v in found.items()}

        return cls(
            dict(tree["rows_read"]),
            tallies(tree["refused"]),
            tallies(tree["notes"]),
            tree["largest_id"],
            tree["with_system"],
            tree["chats"],
        )


def find_part(path: str, format: str) -> Part:
    """The files of a source and their format. Raises DataError (two formats, none recognised, no rows)."""
    files, passed = find_files(path)
    if format != "auto":
        return Part(path, tuple(files), format, tuple(passed))
    seen: dict[str, str] = {}  # format -> first file with it
    for file in files:
        rows = [r.value for r in islice(read_rows(file), _PEEK) if isinstance(r, Row)]
        found = next((name for name in map(recognise, rows) if name), None)
        if found is None and rows:
            raise unrecognised(file.name, rows)
        if found:
            seen.setdefault(found, file.name)
    if len(seen) > 1:
        (one, first), (two, second) = list(seen.items())[:2]
        raise DataError(
            f"'{path}' mixes two formats",
            f"'{first}' holds {one}, '{second}' holds {two}",
            "name them as two sources of data.train, or say which with format:",
        )
    if not seen and not any(isinstance(r, Unreadable) for f in files for r in islice(read_rows(f), 1)):
        raise DataError(f"'{path}' has no rows", "it is empty", "check the file that writes it")
    return Part(path, tuple(files), next(iter(seen), "text"), tuple(passed))


def digest_of(files: Sequence[DataFile]) -> str:
    """Hash of names and contents."""
    found = hashlib.blake2b(digest_size=16)
    for file in files:
        found.update(f"{file.name} {file.kind}\n".encode())
        with file.path.open("rb") as raw:
            while block := raw.read(2**22):
                found.update(block)
    return found.hexdigest()


def build_store(
    parts: Sequence[Part], folder: Path, encoder: Callable[[], Encoder], progress: Progress | None = None
) -> tuple[Store, Account]:
    """The store in `folder`, made if it is not there. `encoder` is called only when there is work.

    Raises DataError when a line of a file is unreadable (all of them are counted), or no row is left.
    """
    names = [file.name for part in parts for file in part.files]
    done = folder / "done.json"
    if not done.exists():
        partial = folder.with_name(folder.name + ".partial")
        try:
            with _OnlyOne(folder):
                if not done.exists():
                    account = _fill(parts, partial, encoder(), progress)
                    (partial / "journal.json").unlink(missing_ok=True)
                    _write(partial / "done.json", {"files": names, "account": asdict(account)})
                    os.replace(partial, folder)
        except OSError as problem:
            raise DataError(
                f"prepared rows cannot be kept in '{folder.parent}'",
                problem.strerror or str(problem),
                "name another folder with the environment variable SHARDWISE_CACHE",
            ) from None
    tree = json.loads(done.read_text(encoding="utf-8"))
    return open_store(folder, tree["files"]), Account.load(tree["account"])


class _OnlyOne:
    """A lock on a folder, so that two processes do not prepare the same rows at once."""

    def __init__(self, folder: Path) -> None:
        self._path = folder.with_name(folder.name + ".lock")

    def __enter__(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._path.open("w")
        try:
            import fcntl
        except ImportError:  # not on Windows; the last one to finish wins there
            return
        fcntl.flock(self._file, fcntl.LOCK_EX)

    def __exit__(self, *_: object) -> None:
        self._file.close()


def _fill(parts: Sequence[Part], folder: Path, encoder: Encoder, progress: Progress | None) -> Account:
    folder.mkdir(parents=True, exist_ok=True)
    journal = folder / "journal.json"
    state = json.loads(journal.read_text(encoding="utf-8")) if journal.exists() else None
    account = Account.load(state["account"]) if state else Account()
    writer = Writer(folder, state["tokens"] if state else 0, state["rows"] if state else 0)
    total = _count(parts)
    broken: list[tuple[str, Unreadable]] = []
    saved = time.monotonic()
    number = -1
    read = sum(account.rows_read.values())
    try:
        for source, part in enumerate(parts):
            parse = reader_of(part.format)
            for file in part.files:
                number += 1
                skip = account.rows_read.get(file.name, 0)
                if state and number < state["file"]:
                    continue
                account.rows_read[file.name] = skip
                for batch in _batches(islice(read_rows(file), skip, None)):
                    rows = [row for row in batch if isinstance(row, Row)]
                    broken += [(file.name, row) for row in batch if isinstance(row, Unreadable)]
                    account.rows_read[file.name] += len(batch)
                    read += len(batch)
                    if not broken:
                        _encode(rows, parse, encoder, writer, account, file.name, number, source)
                    if progress is not None:
                        progress("tokenizing", read, total)
                    if not broken and time.monotonic() - saved > JOURNAL_SECONDS:
                        _save(journal, writer, account, number)
                        saved = time.monotonic()
        writer.flush()
    finally:
        writer.close()
    if broken:
        raise _unreadable(broken)
    return account


def _save(journal: Path, writer: Writer, account: Account, file: int) -> None:
    writer.flush()
    _write(
        journal,
        {"file": file, "tokens": writer.tokens, "rows": writer.rows, "account": asdict(account)},
    )


def _batches(rows: Iterator[Row | Unreadable]) -> Iterator[list[Row | Unreadable]]:
    """At most BATCH rows and about 4 million characters at a time."""
    while batch := list(islice(rows, BATCH)):
        yield batch


def _encode(
    rows: Sequence[Row],
    parse: Callable[[Any], Example],
    encoder: Encoder,
    writer: Writer,
    account: Account,
    name: str,
    file: int,
    source: int,
) -> None:
    examples, places = [], []
    for row in rows:
        if row.mended:
            account.note("lone surrogates, replaced by U+FFFD", name, row.line)
        try:
            example = parse(row.value)
            if isinstance(example, Preference):
                raise RowProblem("a preference pair: it can be checked, not trained on with this method")
            examples.append(example)
            places.append(row.line)
        except RowProblem as problem:
            account.refuse(str(problem), name, row.line)
    for example, line, found in zip(examples, places, encoder.encode(examples), strict=True):
        if isinstance(found, RowProblem):
            account.refuse(str(found), name, line)
            continue
        messages = getattr(example, "messages", None)
        if messages is not None:
            account.chats += 1
            account.with_system += messages[0]["role"] == "system"
        for note in dict.fromkeys(found.notes):
            account.note(note, name, line)
        _append(writer, found, account, line, file, source)


def _append(writer: Writer, found: Encoded, account: Account, line: int, file: int, source: int) -> None:
    if len(found.ids):
        account.largest_id = max(account.largest_id, int(found.ids.max()))
    digest = hashlib.blake2b(found.ids.tobytes(), digest_size=8).digest()
    writer.append(
        found.ids,
        found.marks,
        line=line,
        file=file,
        source=source,
        text=int(found.text),
        ended=int(found.ended),
        digest=int(np.frombuffer(digest, "<u8")[0]),
    )


def _count(parts: Sequence[Part]) -> int | None:
    """Rows to come, for the progress bar; None when counting would cost as much as reading."""
    total = 0
    for part in parts:
        for file in part.files:
            if file.kind == "text":
                total += 1
            elif file.kind == "jsonl" and file.path.suffix not in (".gz", ".bz2", ".xz"):
                with file.path.open("rb") as raw:
                    total += sum(block.count(b"\n") for block in iter(lambda: raw.read(2**20), b""))
            else:
                return None
    return total


def _unreadable(broken: Sequence[tuple[str, Unreadable]]) -> DataError:
    lines = [f"{name}, line {b.line}, column {b.column}: {b.reason}" for name, b in broken]
    shown = [f"{text}: {b.excerpt!r}" for text, (_, b) in zip(lines[:5], broken, strict=False)]
    if len(broken) == 1:
        return DataError(
            lines[0], f"it reads {broken[0][1].excerpt!r}", "mend that line; nothing was started"
        )
    more = [f"and {len(broken) - 5} more"] if len(broken) > 5 else []
    return DataError(
        f"{len(broken)} lines cannot be read",
        "\n       ".join(shown + more),
        "mend them all; nothing was started",
    )


def _write(path: Path, tree: Any) -> None:
    """Whole or not at all."""
    fresh = path.with_name(path.name + ".new")
    fresh.write_text(json.dumps(tree), encoding="utf-8")
    os.replace(fresh, path)
