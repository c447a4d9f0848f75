"""Batches of rows -> tokens, here or on several processes, in order."""

import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from shardwise.data.conversations import RowProblem
from shardwise.data.encode import REWRITTEN, Encoder
from shardwise.data.formats import Chat, Preference, reader_of
from shardwise.data.readers import Row
from shardwise.data.templates import chat_template
from shardwise.data.tokenizer import shared_tokenizer
from shardwise.errors import DataError, RunError

MOST_WORKERS = 16


@dataclass(frozen=True)
class EncoderSpec:
    """All that a process needs to make the same encoder."""

    model: Path
    template: str | None
    templated: bool  # False: no chats are expected, so a model without a good template will do
    train_on: str
    trust_remote_code: bool = False

    def make(self) -> Encoder:
        tokenizer = shared_tokenizer(self.model, self.trust_remote_code)
        template = None
        try:
            template = chat_template(tokenizer, self.template)
        except DataError:
            if self.templated:
                raise
        return Encoder(tokenizer, template, self.train_on)


@dataclass(frozen=True)
class Batch:
    """Rows of one file. `read`: how many rows the file gave for them, unreadable ones included."""

    file: int
    name: str
    source: int
    format: str
    rows: tuple[Row, ...]
    read: int


@dataclass
class Tokens:
    """What a batch became: its usable rows one after the other; the others by (line, reason)."""

    ids: np.ndarray  # (tokens of all rows,) int32
    marks: np.ndarray  # (tokens of all rows,) uint8
    lengths: list[int] = field(default_factory=list)
    lines: list[int] = field(default_factory=list)
    text: list[bool] = field(default_factory=list)
    ended: list[bool] = field(default_factory=list)
    refused: list[tuple[int, str]] = field(default_factory=list)
    notes: list[tuple[int, str]] = field(default_factory=list)
    chats: int = 0
    with_system: int = 0
    answers: int = 0  # of chats, with a label
    rewritten: int = 0  # of chats, without one because the template rewrites them


def encode_batch(encoder: Encoder, batch: Batch) -> Tokens:
    """Parse, render, tokenize and label the rows of a batch."""
    out = Tokens(np.zeros(0, np.int32), np.zeros(0, np.uint8))
    parse = reader_of(batch.format)
    examples, lines = [], []
    for row in batch.rows:
        if row.mended:
            out.notes.append((row.line, "lone surrogates, replaced by U+FFFD"))
        try:
            example = parse(row.value)
            if isinstance(example, Preference):
                raise RowProblem("a preference pair: it can be checked, not trained on with this method")
        except RowProblem as problem:
            out.refused.append((row.line, str(problem)))
            continue
        examples.append(example)
        lines.append(row.line)
    ids, marks = [out.ids], [out.marks]
    for example, line, found in zip(examples, lines, encoder.encode(examples), strict=True):
        if isinstance(found, RowProblem):
            out.refused.append((line, str(found)))
            continue
        if isinstance(example, Chat):
            out.chats += 1
            out.with_system += example.messages[0]["role"] == "system"
            out.answers += found.answers
            out.rewritten += found.notes.count(REWRITTEN)
        out.notes += [(line, note) for note in dict.fromkeys(found.notes)]
        ids.append(found.ids)
        marks.append(found.marks)
        out.lengths.append(len(found.ids))
        out.lines.append(line)
        out.text.append(found.text)
        out.ended.append(found.ended)
    out.ids, out.marks = np.concatenate(ids), np.concatenate(marks)
    return out


def encode_batches(
    batches: Iterator[Batch], spec: EncoderSpec, workers: int
) -> Iterator[tuple[Batch, Tokens]]:
    """Each batch with its tokens, in the order given; on `workers` processes when more than one."""
    if workers <= 1:
        encoder: Encoder | None = None
        for batch in batches:
            if batch.rows and encoder is None:
                encoder = spec.make()
            yield batch, _encode_with(encoder, batch)
        return
    spec.make()  # a broken model or template is told once, from here
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _start, (spec,))
    waiting: deque[tuple[Batch, Future[Tokens]]] = deque()
    try:
        for batch in batches:
            waiting.append((batch, pool.submit(_work, batch)))
            if len(waiting) > 2 * workers:
                first, future = waiting.popleft()
                yield first, future.result()
        while waiting:
            first, future = waiting.popleft()
            yield first, future.result()
        pool.shutdown()
    except BrokenProcessPool:
        raise RunError(
            "a process that tokenizes rows died",
            "it ran out of memory, was killed, or could not be started",
            "use one process: SHARDWISE_WORKERS=1; what is done so far is kept",
        ) from None
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def worker_count(data_bytes: int) -> int:
    """Processes for this much data: one below 24 MB, where starting more costs more than it saves.

    SHARDWISE_WORKERS sets it.
    """
    given = os.environ.get("SHARDWISE_WORKERS", "")
    if given.isdigit() and int(given) > 0:
        return int(given)
    if data_bytes < 24 * 10**6 or multiprocessing.parent_process() is not None:
        return 1
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, MOST_WORKERS)


def _encode_with(encoder: Encoder | None, batch: Batch) -> Tokens:
    return (
        encode_batch(encoder, batch)
        if encoder is not None
        else Tokens(np.zeros(0, np.int32), np.zeros(0, np.uint8))
    )


_encoder: Encoder | None = None  # of a worker process


def _start(spec: EncoderSpec) -> None:
    global _encoder
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which then stops us
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one core each
    _encoder = spec.make()


def _work(batch: Batch) -> Tokens:
    return _encode_with(_encoder, batch)
