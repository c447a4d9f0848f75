"""Tokens on disk: flat files, memory-mapped, read by row.

    tokens.bin   int32, one per token, rows one after the other
    marks.bin    uint8, one per token: 1 trained, 2 a cut before this token would split a character
    rows.bin     one record per row (ROW)

Opening a store reads nothing; a row costs two slices. No pickle, nothing to execute.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from shardwise.errors import DataError

UNTRAINED = -100
TRAINED, INSIDE_CHARACTER = 1, 2  # bits of a mark

ROW = np.dtype(
    [
        ("end", "<i8"),  # tokens up to and with this row
        ("line", "<i8"),  # 1-based line (or row) in its file
        ("digest", "<u8"),  # of the tokens: finds duplicates
        ("file", "<i4"),
        ("trained", "<i4"),
        ("source", "<i2"),
        ("text", "<u1"),  # 1: a document of continuous text
        ("ended", "<u1"),  # 1: its last trained token is an end token
    ]
)


def sizes(tokens: int, rows: int) -> tuple[tuple[str, int], ...]:
    """Bytes of each file of a store with so many tokens and rows."""
    return (("tokens.bin", 4 * tokens), ("marks.bin", tokens), ("rows.bin", ROW.itemsize * rows))


def holds(folder: Path, tokens: int, rows: int) -> bool:
    """Whether the files are at least that long: a machine that lost power may have kept less than was written."""
    return all(
        (folder / n).exists() and (folder / n).stat().st_size >= size for n, size in sizes(tokens, rows)
    )


class Writer:
    """Appends rows. `position()` and `truncate()` let a broken-off preparation go on where it stopped."""

    def __init__(self, folder: Path, tokens: int = 0, rows: int = 0) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.tokens, self.rows = tokens, rows
        self._files = []
        for name, size in (
            ("tokens.bin", 4 * tokens),
            ("marks.bin", tokens),
            ("rows.bin", ROW.itemsize * rows),
        ):
            file = (folder / name).open("r+b" if (folder / name).exists() else "w+b")
            file.truncate(size)
            file.seek(size)
            self._files.append(file)

    def append(self, ids: np.ndarray, marks: np.ndarray, **fields: int) -> None:
        """One row: ids (T,) int32, marks (T,) uint8, and the fields of ROW that are not counted here."""
        self.tokens += len(ids)
        self.rows += 1
        record = np.zeros((), ROW)
        record["end"] = self.tokens
        record["trained"] = int((marks[1:] & TRAINED).sum())
        for name, value in fields.items():
            record[name] = value
        for file, part in zip(self._files, (ids.astype("<i4"), marks.astype("u1"), record), strict=True):
            file.write(part.tobytes())

    def flush(self) -> None:
        for file in self._files:
            file.flush()

    def close(self) -> None:
        for file in self._files:
            file.close()


@dataclass(frozen=True, eq=False)
class Store:
    """An opened store."""

    folder: Path
    files: tuple[str, ...]  # what the `file` numbers of its records mean
    tokens: np.ndarray  # (all tokens,) int32
    marks: np.ndarray  # (all tokens,) uint8
    records: np.ndarray  # (rows,) ROW

    def first(self, row: np.ndarray) -> np.ndarray:
        """Where rows begin in `tokens`: (N,) int64."""
        ends = self.records["end"]
        return np.where(row > 0, ends[np.maximum(row - 1, 0)], 0)


def open_store(folder: Path, files: Sequence[str]) -> Store:
    """Map a finished store into memory. Raises DataError when its files do not fit together."""

    def view(name: str, dtype: np.dtype) -> np.ndarray:
        path = folder / name
        if path.stat().st_size == 0:
            return np.zeros(0, dtype)
        return np.memmap(path, dtype=dtype, mode="r")

    try:
        tokens, marks = view("tokens.bin", np.dtype("<i4")), view("marks.bin", np.dtype("u1"))
        records = view("rows.bin", ROW)
        total = int(records["end"][-1]) if len(records) else 0
        whole = len(tokens) == len(marks) == total
    except (OSError, ValueError):
        whole = False
    if not whole:
        raise DataError(
            f"prepared rows in '{folder}' are damaged",
            "the files do not hold what their index says",
            f"delete that folder and start again: rm -r '{folder}'",
        )
    return Store(folder, tuple(files), tokens, marks, records)


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows as training sees them: a selection of a store's rows, cut to the sequence length.

    All arrays are (N,), N rows: about 45 bytes of memory for each, whatever its length.
    """

    store: Store
    base: np.ndarray  # int64, row of the store
    starts: np.ndarray  # int64, first token within that row
    lengths: np.ndarray  # int64, tokens
    trained: np.ndarray  # int64, tokens with a label
    groups: np.ndarray  # int64, -1, or the full sequence of continuous text that a row is part of
    weights: tuple[float, ...] = (1.0,)  # of the sources

    def __len__(self) -> int:
        return len(self.base)

    @property
    def sources(self) -> np.ndarray:
        """(N,) int16: which source of the recipe each row came from."""
        out: np.ndarray = np.asarray(self.store.records["source"])[self.base]
        return out

    @property
    def files(self) -> tuple[str, ...]:
        return self.store.files

    def row(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        """(ids, labels), both (T,) int32. labels[t] belongs to ids[t]: -100 where untrained and at t = 0."""
        base = int(self.base[i])
        first = int(self.store.records["end"][base - 1]) if base else 0
        first += int(self.starts[i])
        part = slice(first, first + int(self.lengths[i]))
        ids = np.array(self.store.tokens[part], dtype=np.int32)
        labels = np.where(self.store.marks[part] & TRAINED, ids, np.int32(UNTRAINED)).astype(np.int32)
        labels[:1] = UNTRAINED
        return ids, labels

    def source(self, i: int) -> tuple[str, int]:
        """(file, line) a row came from, for messages."""
        record = self.store.records[int(self.base[i])]
        return self.store.files[int(record["file"])], int(record["line"])

    def select(self, keep: np.ndarray) -> "Rows":
        """The rows at the positions (or under the mask) `keep`."""
        return Rows(
            self.store,
            self.base[keep],
            self.starts[keep],
            self.lengths[keep],
            self.trained[keep],
            self.groups[keep],
            self.weights,
        )
