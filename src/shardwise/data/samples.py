"""A few prepared rows as text, with the trained part marked."""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from shardwise.data.store import UNTRAINED, Rows
from shardwise.data.tokenizer import Tokenizer


@dataclass(frozen=True)
class Sample:
    """`parts`: (text, trained) in order; together the whole row as the model sees it."""

    file: str
    line: int
    tokens: int
    trained_tokens: int
    parts: tuple[tuple[str, bool], ...]


def samples(rows: Rows, tokenizer: Tokenizer, count: int, tokens: int = 400) -> tuple[Sample, ...]:
    """`count` rows spread over the set, each shown up to `tokens` tokens around its trained part."""
    chosen = np.unique(np.linspace(0, len(rows) - 1, min(count, len(rows))).astype(int)).tolist()
    return tuple(_sample(rows, i, tokenizer, tokens) for i in chosen)


def _sample(rows: Rows, i: int, tokenizer: Tokenizer, most: int) -> Sample:
    ids, labels = rows.row(i)
    mask = labels != UNTRAINED
    file, line = rows.source(i)
    total, trained = len(ids), int(mask.sum())
    first = max(0, min(int(np.argmax(mask)) - most // 2, total - most)) if trained else 0
    ids, mask = ids[first : first + most], mask[first : first + most]
    edges = [0, *(np.flatnonzero(np.diff(mask.astype(np.int8))) + 1).tolist(), len(ids)]
    parts = [(tokenizer.text_of(ids[a:b].tolist()), bool(mask[a])) for a, b in pairwise(edges)]
    if first:
        parts.insert(0, (f"... {first:,} tokens ...", False))
    if first + most < total:
        parts.append((f"... {total - first - most:,} tokens ...", False))
    return Sample(file, line, total, trained, tuple(parts))
