"""`data.streaming`: everything that can be checked and said before a run about rows that are read during it."""

import hashlib
import json
import math
from dataclasses import replace
from itertools import islice
from pathlib import Path

from shardwise.data.batches import Batch, EncoderSpec, encode_batches
from shardwise.data.build import Account, Part, Progress, find_part, take
from shardwise.data.preparation import (
    Prepared,
    nothing_left,
    prepare,
    refuse_preference,
    report_of,
    template_facts,
    tokens_key,
)
from shardwise.data.readers import Unreadable, read_rows
from shardwise.data.store import Store
from shardwise.data.stream import Memory, StreamSpec
from shardwise.data.view import TEXT_SEQUENCE, asked_length, view
from shardwise.errors import DataError, RecipeError
from shardwise.recipe.schema import Data, Recipe
from shardwise.units import format_bytes

LOOKED_AT = 256  # rows of each source, before a run


def prepare_stream(
    data: Data,
    model: Path | str,
    folder: Path,
    *,
    revision: str | None,
    chat_template: str | None,
    max_length: int | None,
    vocabulary: int | None,
    seed: int,
    cache: Path | None,
    progress: Progress | None,
    trust_remote_code: bool,
) -> Prepared:
    """As `prepare`: files are found, formats recognised, and the first rows of each source tokenized.

    `train` of the result holds these first rows; `stream` yields all of them. Raises what `prepare` raises.
    """
    _refuse(data)
    parts = [find_part(s.path, s.format, fetch=False) for s in data.train]
    refuse_preference(parts)
    length, why = _length(data.sequence_length, max_length)
    chats = any(p.format in ("messages", "sharegpt") for p in parts) or chat_template is not None
    encoder = EncoderSpec(folder, chat_template, chats, data.train_on, trust_remote_code)
    key = [
        *tokens_key(folder, chat_template, data.train_on),
        [(p.format, [(Path(f.name).name, f.size_bytes) for f in p.files]) for p in parts],
        [[s.weight for s in data.train], length, data.packing, data.overlong, data.buffer_rows, seed],
    ]
    digest = hashlib.blake2b(json.dumps(key).encode(), digest_size=16).hexdigest()
    weights = tuple(s.weight for s in data.train)
    spec = StreamSpec(
        tuple(parts),
        weights,
        encoder,
        length,
        data.packing,
        data.overlong,
        data.buffer_rows,
        seed,
        digest,
        vocabulary,
    )
    store, account = _first_rows(spec)
    seen = view(store, length, data.overlong, tuple(1.0 for _ in parts), seed)
    if not len(seen.rows):
        raise nothing_left(account, seen, len(store.records))
    held = None
    said = "none: rows of a stream cannot be held out before they are read; name a file in data.validation"
    if isinstance(data.validation, tuple):
        held_data = {"train": data.validation, "validation": 0, "streaming": False, "sequence_length": length}
        held = prepare(
            data.model_copy(update=held_data),
            model,
            revision=revision,
            chat_template=chat_template,
            max_length=max_length,
            vocabulary=vocabulary,
            seed=seed,
            cache=cache,
            progress=progress,
            trust_remote_code=trust_remote_code,
        ).train
        said = f"{len(held):,} rows of {', '.join(s.path for s in data.validation)}"
    facts = template_facts(folder, chat_template, trust_remote_code) if account.chats else {}
    report = report_of(parts, [account], [seen], [store], seen.rows, None, said, length, why, facts)
    report = replace(report, streamed=_said(parts, weights, data.buffer_rows))
    return Prepared(seen.rows, held, report, length, digest, stream=spec)


def stream_steps(recipe: Recipe, sequence_length: int, global_batch_size: int) -> int:
    """Optimizer steps of a streamed run: as many as asked, or as a budget of tokens has room for in full sequences.

    Raises RecipeError without either.
    """
    training = recipe.training
    if training.max_steps is not None:
        return training.max_steps
    if training.max_tokens is not None:
        return math.ceil(training.max_tokens / (sequence_length * global_batch_size))
    raise RecipeError(
        "data.streaming without training.max_steps or training.max_tokens",
        "how many rows there are is not known before they are read, and the learning rate needs the last step",
        "set training.max_steps: 1000, or training.max_tokens: 100000000",
    )


def _refuse(data: Data) -> None:
    if data.overlong == "refuse":
        raise DataError(
            "data.overlong = refuse with data.streaming",
            "the longest row is not known before all of them are read",
            "set data.overlong to truncate or drop: what is cut or dropped is counted",
        )
    if data.validation != "auto" and not isinstance(data.validation, tuple) and data.validation:
        raise DataError(
            f"data.validation = {data.validation} with data.streaming",
            "rows of a stream cannot be held out before they are read",
            "name a file: data.validation: held-out.jsonl, or set it to 0",
        )


def _length(asked: int | str, longest_allowed: int | None) -> tuple[int, str]:
    if isinstance(asked, int):
        return asked_length(asked, longest_allowed)
    if longest_allowed is not None and longest_allowed < TEXT_SEQUENCE:
        return longest_allowed, "what the model was built for"
    return TEXT_SEQUENCE, "usual; the rows of a stream are not all looked at before"


def _first_rows(spec: StreamSpec) -> tuple[Store, Account]:
    """The first rows of each source, tokenized in memory, and what became of them."""
    memory, account = Memory(), Account()
    batches: list[Batch] = []
    number = 0
    for source, part in enumerate(spec.parts):
        left = LOOKED_AT
        for file in part.files:
            found = list(islice(read_rows(file), left)) if left else []
            left -= len(found)
            account.rows_read.setdefault(file.name, 0)
            for row in found:
                if isinstance(row, Unreadable):
                    account.rows_read[file.name] += 1
                    account.refuse(f"it cannot be read: {row.reason}", file.name, row.line)
            rows = tuple(row for row in found if not isinstance(row, Unreadable))
            batches.append(Batch(number, file.name, source, part.format, rows, len(rows)))
            number += 1
    for batch, tokens in encode_batches(iter(batches), spec.encoder, 1):
        account.rows_read[batch.name] += batch.read
        take(batch, tokens, memory, account)
    return memory.store(spec.files), account


def _said(parts: list[Part], weights: tuple[float, ...], buffer_rows: int) -> str:
    files = [file for part in parts for file in part.files]
    size = sum(file.size_bytes for file in files)
    text = (
        f"{len(files):,} file{'s' * (len(files) != 1)}, {format_bytes(size)}, read during the run and never kept; "
        f"shuffled within {buffer_rows:,} rows; these numbers are of the first {LOOKED_AT} rows of each source"
    )
    if len(parts) > 1:
        ratio = " : ".join(f"{w:g}" for w in weights)
        text += (
            f"; rows are drawn from {', '.join(p.path for p in parts)} as {ratio}; one that ends starts again"
        )
    return text
