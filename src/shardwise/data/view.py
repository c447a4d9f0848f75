"""A store -> the rows training sees: cut to the sequence length, without rows that train nothing."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shardwise.data.report import Finding, Lengths
from shardwise.data.store import INSIDE_CHARACTER, TRAINED, Rows, Store
from shardwise.errors import DataError

TEXT_SEQUENCE = 2048  # `auto` for continuous text, where the model allows it
_ROUND = 64
_PLACES = 20


@dataclass(frozen=True)
class View:
    rows: Rows
    dropped: tuple[Finding, ...]
    truncated: int
    documents: int
    text_sequences: int


def asked_length(asked: int, longest_allowed: int | None) -> tuple[int, str]:
    """As `choose_length`, for a length that the recipe names."""
    if longest_allowed is not None and asked > longest_allowed:
        raise DataError(
            f"data.sequence_length = {asked}",
            f"the model was built for {longest_allowed} positions",
            f"set data.sequence_length to {longest_allowed} or less",
        )
    return asked, "set in the recipe"


def choose_length(stores: Sequence[Store], asked: int | str, longest_allowed: int | None) -> tuple[int, str]:
    """(sequence_length, why). Raises DataError for one that the model was not built for."""
    if isinstance(asked, int):
        return asked_length(asked, longest_allowed)
    chats = [full_lengths(s)[np.asarray(s.records["text"]) == 0] for s in stores]
    longest = max((int(c.max()) for c in chats if len(c)), default=0)
    chosen = -(-longest // _ROUND) * _ROUND
    why = f"the longest row has {longest:,} tokens"
    if any(bool(s.records["text"].any()) for s in stores):
        chosen = max(chosen, TEXT_SEQUENCE)
        why = f"continuous text is cut into {TEXT_SEQUENCE:,} tokens" if chosen == TEXT_SEQUENCE else why
    if longest_allowed is not None and chosen > longest_allowed:
        return longest_allowed, f"what the model was built for; {why}"
    return max(chosen, 2), why


def full_lengths(store: Store) -> np.ndarray:
    """Tokens of every stored row before cutting: (N,) int64."""
    return np.diff(np.asarray(store.records["end"]), prepend=0)


def view(store: Store, sequence_length: int, overlong: str, weights: tuple[float, ...], seed: int) -> View:
    """`overlong`: truncate, drop or refuse rows longer than `sequence_length`.

    Continuous text: the documents of a source, shuffled, are laid one after the other and cut into sequences
    of exactly `sequence_length` tokens (the last one holds the rest). A document that goes on in the next
    sequence repeats one token there as context, without a label, so that every token is trained once.

    Raises DataError (overlong rows refused).
    """
    records = np.asarray(store.records)
    lengths = full_lengths(store)
    chats = np.flatnonzero(records["text"] == 0)
    long = chats[lengths[chats] > sequence_length]
    dropped: list[Finding] = []
    if len(long) and overlong == "refuse":
        longest = int(lengths[long].max())
        first = ", ".join(f"{f} line {n}" for f, n in _places(store, long)[:3])
        raise DataError(
            f"{len(long)} of {len(chats)} rows are longer than sequence_length {sequence_length}",
            f"the longest has {longest} tokens; the first are {first}",
            f"set data.sequence_length to {longest}, or data.overlong to truncate or drop",
        )
    if len(long) and overlong == "drop":
        dropped.append(_finding(store, long, f"longer than sequence_length {sequence_length}"))
        chats = chats[lengths[chats] <= sequence_length]
    cut = np.minimum(lengths[chats], sequence_length)
    trained = records["trained"][chats].astype(np.int64)
    for i in np.flatnonzero(lengths[chats] > sequence_length).tolist():
        cut[i], trained[i] = _truncate(store, int(chats[i]), sequence_length)
    truncated = int((cut < lengths[chats]).sum())
    empty = trained == 0
    if empty.any():
        where = chats[empty]
        why = "no trainable token" + (f" within {sequence_length} tokens" if truncated else "")
        dropped.append(_finding(store, where, why))
    keep = ~empty
    pieces, documents, sequences = _text(store, records, lengths, sequence_length, seed)
    text_trained = pieces[:, 2] - 1
    fits = text_trained > 0
    lost = np.setdiff1d(np.flatnonzero(records["text"] == 1), pieces[fits, 0])
    if len(lost):
        dropped.append(_finding(store, lost, "no trainable token in the document"))
    base = np.concatenate([chats[keep], pieces[fits, 0]])
    rows = Rows(
        store,
        base,
        np.concatenate([np.zeros(int(keep.sum()), np.int64), pieces[fits, 1]]),
        np.concatenate([cut[keep], pieces[fits, 2]]),
        np.concatenate([trained[keep], text_trained[fits]]),
        np.concatenate([np.full(int(keep.sum()), -1, np.int64), pieces[fits, 3]]),
        weights,
    )
    return View(rows, tuple(dropped), truncated, documents, sequences)


def _truncate(store: Store, row: int, length: int) -> tuple[int, int]:
    """(tokens kept, trained tokens among them); never a cut inside a character."""
    first = int(store.records["end"][row - 1]) if row else 0
    marks = np.asarray(store.marks[first : first + length + 1])
    while length > 0 and marks[length] & INSIDE_CHARACTER:
        length -= 1
    return length, int((marks[1:length] & TRAINED).sum())


def _text(
    store: Store, records: np.ndarray, lengths: np.ndarray, capacity: int, seed: int
) -> tuple[np.ndarray, int, int]:
    """Pieces (P, 4) int64 of documents: row, first token, tokens, sequence; and the two counts."""
    pieces: list[tuple[int, int, int, int]] = []
    sequence, documents = 0, 0
    for source in np.unique(records["source"][records["text"] == 1]).tolist():
        mine = np.flatnonzero((records["text"] == 1) & (records["source"] == source))
        mine = np.random.default_rng([seed, 2_000_003, source]).permutation(mine)
        documents += len(mine)
        room = capacity
        for row in mine.tolist():
            at, end = 0, int(lengths[row])
            while True:
                if room < 2:
                    sequence, room = sequence + 1, capacity
                taken = min(room, end - at)
                pieces.append((row, at, taken, sequence))
                room -= taken
                at += taken
                if at == end:
                    break
                at -= 1  # context for the next token
        if room < capacity:
            sequence += 1
    return np.asarray(pieces, dtype=np.int64).reshape(-1, 4), documents, sequence


def _places(store: Store, rows: np.ndarray) -> tuple[tuple[str, int], ...]:
    found = store.records[rows[:_PLACES]]
    return tuple((store.files[int(r["file"])], int(r["line"])) for r in found)


def _finding(store: Store, rows: np.ndarray, reason: str) -> Finding:
    return Finding(reason, len(rows), _places(store, rows))


def measure(lengths: np.ndarray) -> Lengths:
    """Length statistics and a histogram with doubling bins."""
    if len(lengths) == 0:
        return Lengths(0, 0, 0, 0, 0, 0, ())
    edges = [0]
    edge = 16
    while edge <= int(lengths.max()):
        edges.append(edge)
        edge *= 2
    edges.append(edge)
    counts, _ = np.histogram(lengths, bins=edges)
    found = [(a, b, int(c)) for a, b, c in zip(edges[:-1], edges[1:], counts, strict=True)]
    while found and found[0][2] == 0:
        found.pop(0)
    return Lengths(
        len(lengths),
        int(lengths.sum()),
        int(lengths.min()),
        int(np.median(lengths)),
        int(np.percentile(lengths, 95)),
        int(lengths.max()),
        tuple(found),
    )
