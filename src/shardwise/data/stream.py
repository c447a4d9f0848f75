"""Rows that are never all prepared: read, tokenized and packed a block at a time while a run goes on.

Sources are mixed row by row in the ratio of their weights; a source that ends starts again. Row n of the mixture
belongs to lane n modulo `lanes`. A lane gathers its next `buffer_rows` rows into a block, tokenizes them,
shuffles and packs them, and hands out the packed sequences. Each optimizer step takes equally many sequences of
every lane, so what a step holds depends on the data, the seed and the number of lanes, and on nothing else: not on
ranks, nor on worker processes, nor on where a run was interrupted. A lane's place is that of the block it is in and
how many sequences it has handed out.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from shardwise.data.batches import Batch, EncoderSpec, encode_batches
from shardwise.data.build import BATCH, Account, Part, Tally, take
from shardwise.data.order import Bin, bins_of
from shardwise.data.readers import Lazy, Row, Unreadable, lazy_rows
from shardwise.data.report import Finding
from shardwise.data.sources import Remote
from shardwise.data.store import ROW, TRAINED, Rows, Store
from shardwise.data.view import view
from shardwise.errors import DataError

_DRAWS = 1000  # rows over which the ratio of the sources is kept
_TRIES = 4  # to go on with a file on the network


@dataclass(frozen=True)
class StreamSpec:
    """All that decides what a stream yields. `vocabulary`: rows of the model's embedding, where known."""

    parts: tuple[Part, ...]
    weights: tuple[float, ...]
    encoder: EncoderSpec
    sequence_length: int
    packing: bool
    overlong: str
    buffer_rows: int
    seed: int
    digest: str  # of files, tokenizer, template and settings
    vocabulary: int | None = None

    @property
    def files(self) -> tuple[str, ...]:
        return tuple(file.name for part in self.parts for file in part.files)


@dataclass(frozen=True)
class Place:
    """Where a lane's block begins. `row`: of the mixture; `sources`: (pass, file of that pass, row of that file).

    `sequences`: handed out before; `account` and `used`: of all blocks before.
    """

    block: int
    row: int
    sources: tuple[tuple[int, int, int], ...]
    sequences: int
    account: dict[str, Any]
    used: int

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def load(cls, tree: Mapping[str, Any]) -> "Place":
        sources = tuple((int(a), int(b), int(c)) for a, b, c in tree["sources"])
        return cls(tree["block"], tree["row"], sources, tree["sequences"], tree["account"], tree["used"])


@dataclass(frozen=True, eq=False)
class Block:
    """Rows read together, and their packed sequences in order."""

    place: Place
    rows: Rows
    bins: tuple[Bin, ...]
    account: Account  # of this block alone

    @property
    def end(self) -> int:
        return self.place.sequences + len(self.bins)

    def used(self, sequences: int) -> int:
        """Rows of the files that are in the first `sequences` packed ones."""
        taken = [i for one in self.bins[:sequences] for i in one]
        return len(np.unique(self.rows.base[taken])) if taken else 0


class Memory:
    """A store that is never written: what `store.Writer` does, for one block."""

    def __init__(self) -> None:
        self._ids: list[np.ndarray] = []
        self._marks: list[np.ndarray] = []
        self._records: list[np.ndarray] = []
        self._tokens = 0

    def append(self, ids: np.ndarray, marks: np.ndarray, **fields: int) -> None:
        self._tokens += len(ids)
        record = np.zeros((), ROW)
        record["end"] = self._tokens
        record["trained"] = int((marks[1:] & TRAINED).sum())
        for name, value in fields.items():
            record[name] = value
        self._ids.append(ids.astype("<i4"))
        self._marks.append(marks.astype("u1"))
        self._records.append(record)

    def store(self, files: Sequence[str]) -> Store:
        none = np.zeros(0)
        return Store(
            Path(),
            tuple(files),
            np.concatenate([none.astype("<i4"), *self._ids]),
            np.concatenate([none.astype("u1"), *self._marks]),
            np.array(self._records, ROW) if self._records else np.zeros(0, ROW),
        )


class _Source:
    """The rows of one source, pass after pass; each pass takes the files in an order of its own."""

    def __init__(self, part: Part, number: int, seed: int, place: tuple[int, int, int]) -> None:
        self._part, self._number, self._seed = part, number, seed
        self.place = place
        self._rows: Iterator[Lazy] | None = None
        self._empty = 0  # files in a row that had no row

    def next(self) -> tuple[int, Lazy]:
        """(number of the file within the source, the row)."""
        tries = 0
        while True:
            turn, at, row = self.place
            file = self._order(turn)[at]
            try:
                if self._rows is None:
                    self._rows = lazy_rows(self._part.files[file])
                    for _ in range(row):  # those before the place; not parsed
                        next(self._rows)
                found = next(self._rows, None)
            except (DataError, StopIteration) as problem:
                tries += 1
                self._rows = None
                if not isinstance(self._part.files[file].path, Remote) or tries >= _TRIES:
                    raise self._changed(file, row, problem) from None
                continue
            if found is not None:
                self._empty = 0
                self.place = (turn, at, row + 1)
                return file, found
            self._rows = None
            self._empty += row == 0
            if self._empty > len(self._part.files):
                raise DataError(
                    f"'{self._part.path}' has no rows", "every file of it is empty", "leave the source out"
                )
            self.place = (turn, at + 1, 0) if at + 1 < len(self._part.files) else (turn + 1, 0, 0)

    def _order(self, turn: int) -> list[int]:
        return _file_order(len(self._part.files), self._seed, self._number, turn)

    def _changed(self, file: int, row: int, problem: Exception) -> Exception:
        if isinstance(problem, DataError):
            return problem
        return DataError(
            f"'{self._part.files[file].name}' has fewer than {row} rows",
            "the run was interrupted behind that row: the file has changed since",
            "put the file back, or start a new run",
        )


@lru_cache(maxsize=16)
def _file_order(files: int, seed: int, source: int, turn: int) -> list[int]:
    order: list[int] = np.random.default_rng([seed, 4_000_037, source, turn]).permutation(files).tolist()
    return order


@lru_cache(maxsize=4)
def draws(weights: tuple[float, ...], seed: int, chunk: int) -> list[int]:
    """Which source each of the rows `chunk` x 1000 to `chunk` x 1000 + 999 of the mixture comes from."""
    if len(weights) == 1:
        return [0] * _DRAWS
    random = np.random.default_rng([seed, 5_000_011, chunk])
    wanted = np.asarray(weights) / sum(weights) * _DRAWS
    counts = np.floor(wanted).astype(int)
    left = _DRAWS - int(counts.sum())
    if left:
        rest = wanted - counts
        counts += np.bincount(random.choice(len(weights), left, p=rest / rest.sum()), minlength=len(weights))
    drawn: list[int] = random.permutation(np.repeat(np.arange(len(weights)), counts)).tolist()
    return drawn


@dataclass
class Lane:
    """One lane of a stream. `workers`: processes that tokenize."""

    spec: StreamSpec
    number: int
    lanes: int
    workers: int
    _marks: deque[tuple[Place, int, Account]] = field(default_factory=deque)

    def beginning(self) -> Place:
        return Place(0, 0, ((0, 0, 0),) * len(self.spec.parts), 0, asdict(Account()), 0)

    def blocks(self, place: Place) -> Iterator[Block]:
        """Blocks from a place on, without end."""
        spec = self.spec
        self._marks.clear()
        sequences, used = place.sequences, place.used
        total = Account.load(place.account)
        encoded = encode_batches(self._batches(place), spec.encoder, self.workers)
        while True:
            memory, account = Memory(), None
            first: Place | None = None
            left = 1
            while left:
                batch, tokens = next(encoded)
                if account is None:
                    first, left, account = self._marks.popleft()
                take(batch, tokens, memory, account)
                left -= 1
            assert first is not None and account is not None
            self._check_vocabulary(account)
            at = Place(first.block, first.row, first.sources, sequences, asdict(total), used)
            block = self._block(at, memory.store(spec.files), account)
            yield block
            sequences, used = block.end, used + block.used(len(block.bins))
            add(total, account)

    def _batches(self, place: Place) -> Iterator[Batch]:
        """The lane's rows in batches; beside each block's first, where the block begins and how many there are."""
        spec = self.spec
        sources = [_Source(p, i, spec.seed, place.sources[i]) for i, p in enumerate(spec.parts)]
        before = np.cumsum([0, *(len(p.files) for p in spec.parts)]).tolist()
        row = place.row
        for number in count(place.block):
            begins = Place(number, row, tuple(s.place for s in sources), 0, {}, 0)
            account = Account()
            found: dict[tuple[int, int], list[Row]] = {}
            mine = 0
            while mine < spec.buffer_rows:
                source = draws(spec.weights, spec.seed, row // _DRAWS)[row % _DRAWS]
                file, lazy = sources[source].next()
                row += 1
                if (row - 1) % self.lanes != self.number:
                    continue
                mine += 1
                read = lazy()
                if isinstance(read, Unreadable):
                    name = spec.parts[source].files[file].name
                    account.rows_read[name] = account.rows_read.get(name, 0) + 1
                    account.refuse(f"it cannot be read: {read.reason}", name, read.line)
                else:
                    found.setdefault((source, file), []).append(read)
            batches = [
                Batch(
                    before[source] + file,
                    spec.parts[source].files[file].name,
                    source,
                    spec.parts[source].format,
                    tuple(rows[i : i + BATCH]),
                    len(rows[i : i + BATCH]),
                )
                for (source, file), rows in found.items()
                for i in range(0, len(rows), BATCH)
            ] or [Batch(0, spec.files[0], 0, spec.parts[0].format, (), 0)]
            for batch in batches:
                account.rows_read[batch.name] = account.rows_read.get(batch.name, 0) + batch.read
            self._marks.append((begins, len(batches), account))
            yield from batches

    def _block(self, place: Place, store: Store, account: Account) -> Block:
        spec = self.spec
        seed = int(np.random.SeedSequence([spec.seed, self.number, place.block]).generate_state(1)[0])
        ones = tuple(1.0 for _ in spec.parts)
        seen = view(store, spec.sequence_length, spec.overlong, ones, seed)
        for finding in seen.dropped:
            _tally(account.dropped, finding)
        if not len(seen.rows):
            return Block(place, seen.rows, (), account)
        bins = bins_of(seen.rows, spec.sequence_length, spec.packing, seed, ones, 0)
        return Block(place, seen.rows, bins, account)

    def _check_vocabulary(self, account: Account) -> None:
        limit = self.spec.vocabulary
        if limit is not None and account.largest_id >= limit:
            raise DataError(
                f"the data hold a token with id {account.largest_id}",
                f"the model's embedding has {limit} rows, ids 0 to {limit - 1}",
                "take the tokenizer that belongs to the model, or resize the model's embedding and save it",
            )


def _tally(into: dict[str, Tally], finding: Finding) -> None:
    tally = into.setdefault(finding.reason, Tally())
    tally.count += finding.count
    tally.places += list(finding.places)[: max(0, 20 - len(tally.places))]


def add(total: Account, part: Account) -> None:
    """Take the counts of `part` into `total`."""
    for name, rows in part.rows_read.items():
        total.rows_read[name] = total.rows_read.get(name, 0) + rows
    for into, of in (
        (total.refused, part.refused),
        (total.dropped, part.dropped),
        (total.notes, part.notes),
    ):
        for reason, tally in of.items():
            _tally(into, Finding(reason, tally.count, tuple(tally.places)))
    total.largest_id = max(total.largest_id, part.largest_id)
    total.chats += part.chats
    total.with_system += part.with_system
    total.answers += part.answers
    total.rewritten += part.rewritten
