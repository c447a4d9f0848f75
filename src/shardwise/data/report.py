"""What is known about a data set before a second of training is spent. Pure data; printed elsewhere."""

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class FileReport:
    name: str
    format: str
    rows_read: int
    rows_refused: int


@dataclass(frozen=True)
class Finding:
    """Rows that share a fate: how many, why, and where the first of them are (file, line)."""

    reason: str
    count: int
    places: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Lengths:
    """Tokens per row before cutting. `histogram`: (from, below, rows)."""

    rows: int
    tokens: int
    shortest: int
    median: int
    p95: int
    longest: int
    histogram: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True)
class DataReport:
    """rows_read = rows_train + rows_validation + rows_refused (by `refused`) + rows_dropped (by `dropped`).

    Continuous text is counted in documents: `documents` of them become `text_sequences` rows; `documents_train` are
    in training, at least in part. `ended`: other training rows that end with a trained end token.
    `tokens`, `trained_tokens`: of the training rows, after cutting to `sequence_length`.
    """

    files: tuple[FileReport, ...]
    passed_over: tuple[str, ...]
    rows_read: int
    rows_train: int
    rows_validation: int
    documents_train: int
    refused: tuple[Finding, ...]
    dropped: tuple[Finding, ...]
    notes: tuple[Finding, ...]
    lengths: Lengths
    sequence_length: int
    sequence_length_why: str
    truncated: int
    ended: int
    tokens: int
    trained_tokens: int
    duplicates: int
    overlap: int
    documents: int
    text_sequences: int
    template: str | None
    system: str
    validation: str
    answers: int = 0  # of chats, with a label, before cutting
    rewritten: int = 0  # of chats, without one: the template writes them differently once others follow
    streamed: str = ""  # how rows are read, where they are read during the run

    @property
    def rows_refused(self) -> int:
        return sum(f.count for f in self.refused)

    @property
    def rows_dropped(self) -> int:
        return sum(f.count for f in self.dropped)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self) | {"rows_refused": self.rows_refused, "rows_dropped": self.rows_dropped}
