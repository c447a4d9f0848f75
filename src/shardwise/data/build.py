"""Files -> a finished store: read, recognise, encode, write; goes on where a broken-off preparation stopped."""

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from shardwise.data.batches import Batch, EncoderSpec, Tokens, encode_batches, worker_count
from shardwise.data.formats import recognise, unrecognised
from shardwise.data.readers import Row, Unreadable, read_rows
from shardwise.data.sources import DataFile, find_files
from shardwise.data.store import Store, Writer, holds, open_store
from shardwise.errors import DataError

BATCH = 512  # rows encoded together
JOURNAL_SECONDS = 2.0
LARGE_BYTES, RESTED_SECONDS = 256 * 2**20, 10.0
EXAMPLES = 20  # places kept for each reason
_PEEK = 200

Progress = Callable[[str, int, int | None], None]


class Appends(Protocol):
    """Where rows go: a file (`store.Writer`) or memory (`stream.Memory`)."""

    def append(self, ids: np.ndarray, marks: np.ndarray, **fields: int) -> None: ...


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
    """What reading found. rows_read = rows in the store + refused. `dropped` is counted here by streams only."""

    rows_read: dict[str, int] = field(default_factory=dict)  # by file
    refused: dict[str, Tally] = field(default_factory=dict)  # by reason
    notes: dict[str, Tally] = field(default_factory=dict)
    largest_id: int = -1
    with_system: int = 0
    chats: int = 0
    dropped: dict[str, Tally] = field(default_factory=dict)
    answers: int = 0  # of chats, with a label
    rewritten: int = 0  # of chats, without one because the template rewrites them

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
            tallies(tree["dropped"]),
            tree["answers"],
            tree["rewritten"],
        )


def find_part(path: str, format: str, fetch: bool = True) -> Part:
    """The files of a source and their format; `fetch` as in `find_files`.

    Raises DataError (two formats, none recognised, no rows).
    """
    files, passed = find_files(path, fetch)
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
            "name them as two sources, or set format: to the one that both can be read as",
        )
    if not seen and not any(isinstance(r, Unreadable) for f in files for r in islice(read_rows(f), 1)):
        raise DataError(f"'{path}' has no rows", "it is empty", "check the file that writes it")
    return Part(path, tuple(files), next(iter(seen), "text"), tuple(passed))


def digest_of(files: Sequence[DataFile], memory: Path) -> str:
    """Hash of names and contents. Hashes of large files are kept in the folder `memory`, see `_content`."""
    found = hashlib.blake2b(digest_size=16)
    for file in files:
        found.update(f"{file.name} {file.kind} {_content(file, memory)}\n".encode())
    return found.hexdigest()


def _content(file: DataFile, memory: Path) -> str:
    """Hash of a file's content.

    Every rank asks for it, and 100 GB take minutes to read. So that of a large file is remembered with the file's
    size, time and inode, once it has rested for a while: a change right after looking could have the same time.
    """
    assert isinstance(file.path, Path)
    fact = file.path.stat()
    rests = fact.st_size >= LARGE_BYTES and time.time() - fact.st_mtime > RESTED_SECONDS
    state = [str(file.path.resolve()), fact.st_size, fact.st_mtime_ns, fact.st_ino, fact.st_dev]
    note = memory / f"{hashlib.blake2b(json.dumps(state).encode(), digest_size=16).hexdigest()}.txt"
    if rests and note.exists():
        return note.read_text(encoding="ascii")
    found = hashlib.blake2b(digest_size=16)
    with file.path.open("rb") as raw:
        while block := raw.read(2**22):
            found.update(block)
    if rests:
        with suppress(OSError):  # a cache that cannot be written is told when rows are to be kept
            memory.mkdir(parents=True, exist_ok=True)
            fresh = note.with_name(f"{note.name}.{os.getpid()}")
            fresh.write_text(found.hexdigest(), encoding="ascii")
            os.replace(fresh, note)
    return found.hexdigest()


def build_store(
    parts: Sequence[Part], folder: Path, spec: EncoderSpec, progress: Progress | None = None
) -> tuple[Store, Account]:
    """The store in `folder`, made if it is not there; `spec` is used only then.

    Raises DataError when a line of a file is unreadable (all of them are counted), or no row is left.
    """
    names = [file.name for part in parts for file in part.files]
    done = folder / "done.json"
    if not done.exists():
        partial = folder.with_name(folder.name + ".partial")
        try:
            with _OnlyOne(folder):
                if not done.exists():
                    account = _fill(parts, partial, spec, progress)
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


def _fill(parts: Sequence[Part], folder: Path, spec: EncoderSpec, progress: Progress | None) -> Account:
    folder.mkdir(parents=True, exist_ok=True)
    journal = folder / "journal.json"
    state = _resumable(folder, journal)
    account = Account.load(state["account"]) if state else Account()
    writer = Writer(folder, state["tokens"] if state else 0, state["rows"] if state else 0)
    total = _count(parts)
    read = sum(account.rows_read.values())
    broken: list[tuple[str, Unreadable]] = []
    saved = time.monotonic()
    batches = _read(parts, state["file"] if state else 0, dict(account.rows_read), broken)
    workers = worker_count(sum(file.size_bytes for part in parts for file in part.files))
    try:
        for batch, tokens in encode_batches(batches, spec, workers):
            account.rows_read[batch.name] = account.rows_read.get(batch.name, 0) + batch.read
            read += batch.read
            take(batch, tokens, writer, account)
            if progress is not None:
                progress("tokenizing", read, total)
            if not broken and time.monotonic() - saved > JOURNAL_SECONDS:
                writer.flush()
                at = {"file": batch.file, "tokens": writer.tokens, "rows": writer.rows}
                _write(journal, at | {"account": asdict(account)})
                saved = time.monotonic()
        writer.flush()
    finally:
        writer.close()
    if broken:
        raise _unreadable(broken)
    return account


def _resumable(folder: Path, journal: Path) -> dict[str, Any] | None:
    """Where a broken-off preparation stopped; None when there was none, or its files are shorter than it says."""
    if not journal.exists():
        return None
    state: dict[str, Any] = json.loads(journal.read_text(encoding="utf-8"))
    return state if holds(folder, state["tokens"], state["rows"]) else None


def _read(
    parts: Sequence[Part], first_file: int, done: dict[str, int], broken: list[tuple[str, Unreadable]]
) -> Iterator[Batch]:
    """The rows still to do, in batches. After the first unreadable line the rest is only looked through."""
    number = -1
    for source, part in enumerate(parts):
        for file in part.files:
            number += 1
            if number < first_file:
                continue
            rows = islice(read_rows(file), done.get(file.name, 0), None)
            none = True
            while found := list(islice(rows, BATCH)):
                none = False
                broken += [(file.name, row) for row in found if isinstance(row, Unreadable)]
                usable = () if broken else tuple(row for row in found if isinstance(row, Row))
                yield Batch(number, file.name, source, part.format, usable, len(found))
            if none:
                yield Batch(number, file.name, source, part.format, (), 0)


def take(batch: Batch, tokens: Tokens, writer: Appends, account: Account) -> None:
    """Write the rows of a batch and keep account of the others."""
    for line, reason in tokens.refused:
        account.refuse(reason, batch.name, line)
    for line, note in tokens.notes:
        account.note(note, batch.name, line)
    account.chats += tokens.chats
    account.with_system += tokens.with_system
    account.answers += tokens.answers
    account.rewritten += tokens.rewritten
    if len(tokens.ids):
        account.largest_id = max(account.largest_id, int(tokens.ids.max()))
    first = 0
    for i, length in enumerate(tokens.lengths):
        ids = tokens.ids[first : first + length]
        digest = hashlib.blake2b(ids.tobytes(), digest_size=8).digest()
        writer.append(
            ids,
            tokens.marks[first : first + length],
            line=tokens.lines[i],
            file=batch.file,
            source=batch.source,
            text=int(tokens.text[i]),
            ended=int(tokens.ended[i]),
            digest=int(np.frombuffer(digest, "<u8")[0]),
        )
        first += length


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
