"""The phase before training: files -> token ids and labels on disk, checked, cached, and the same for every rank."""

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from shardwise.data.batches import EncoderSpec
from shardwise.data.build import Account, Part, Progress, Tally, build_store, digest_of, find_part
from shardwise.data.report import DataReport, FileReport, Finding
from shardwise.data.split import duplicates, overlap, split, units
from shardwise.data.store import Rows, Store
from shardwise.data.templates import chat_template as load_template
from shardwise.data.templates import shipped, template_text
from shardwise.data.tokenizer import fingerprint, shared_tokenizer, tokenizer_folder
from shardwise.data.view import View, choose_length, full_lengths, measure, view
from shardwise.errors import DataError
from shardwise.recipe.schema import Data, Source

if TYPE_CHECKING:
    from shardwise.data.stream import StreamSpec

VERSION = 4  # of everything here that changes tokens; part of the cache key


@dataclass(frozen=True, eq=False)
class Prepared:
    train: Rows
    validation: Rows | None
    report: DataReport
    sequence_length: int
    cache_key: str
    held_out: int = 0  # rows (or sequences of continuous text) set aside from the training files
    stream: "StreamSpec | None" = None  # with data.streaming; `train` then holds the first rows only


def default_cache() -> Path:
    """SHARDWISE_CACHE, or shardwise's folder in the user's cache folder."""
    given = os.environ.get("SHARDWISE_CACHE")
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(given) if given else Path(base) / "shardwise"


def prepare(
    data: Data,
    model_folder: Path | str,
    *,
    revision: str | None = None,
    chat_template: str | None = None,
    max_length: int | None = None,
    vocabulary: int | None = None,
    seed: int = 0,
    cache: Path | None = None,
    progress: Progress | None = None,
    trust_remote_code: bool = False,
) -> Prepared:
    """Read, tokenize, label and split what `data` names, or take it from the cache.

    `max_length`: positions the model was built for; `vocabulary`: rows of its embedding; `progress` is called
    with (phase, rows done, rows in all or None). The second call with the same files, tokenizer, template and
    settings reads nothing but an index; a preparation that broke off goes on where it stopped.

    Raises DataError, ModelError, MissingDependencyError.
    """
    folder = tokenizer_folder(model_folder, revision)
    if data.streaming:
        from shardwise.data.streaming import prepare_stream

        return prepare_stream(
            data,
            model_folder,
            folder,
            revision=revision,
            chat_template=chat_template,
            max_length=max_length,
            vocabulary=vocabulary,
            seed=seed,
            cache=cache,
            progress=progress,
            trust_remote_code=trust_remote_code,
        )
    cache = (cache or default_cache()) / "data"
    key = tokens_key(folder, chat_template, data.train_on)

    def stored(sources: Sequence[Source]) -> _Stored:
        parts = [find_part(s.path, s.format) for s in sources]
        refuse_preference(parts)
        text = json.dumps([*key, [(p.format, digest_of(p.files, cache / "files")) for p in parts]])
        name = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
        chats = any(p.format in ("messages", "sharegpt") for p in parts) or chat_template is not None
        spec = EncoderSpec(folder, chat_template, chats, data.train_on, trust_remote_code)
        return _Stored(name, parts, *build_store(parts, cache / name, spec, progress))

    own = stored(data.train)
    held = stored(data.validation) if isinstance(data.validation, tuple) else None
    both = [own, *([held] if held else [])]
    _check_vocabulary([s.account for s in both], vocabulary, folder, trust_remote_code)
    facts = _facts(cache / own.name, folder, chat_template, trust_remote_code) if own.account.chats else {}
    return _seen(
        data, own, held, choose_length([s.store for s in both], data.sequence_length, max_length), seed, facts
    )


@dataclass(frozen=True, eq=False)
class _Stored:
    """Sources that were tokenized, whatever the sequence length will be."""

    name: str  # of the store; made of everything that changes tokens
    parts: list[Part]
    store: Store
    account: Account


def _seen(
    data: Data, own: _Stored, held: _Stored | None, length: tuple[int, str], seed: int, facts: dict[str, str]
) -> Prepared:
    """Tokenized rows cut to a length and split. Raises DataError when none is left."""
    size, why = length
    seen = view(own.store, size, data.overlong, tuple(s.weight for s in data.train), seed)
    if len(seen.rows) == 0:
        raise nothing_left(own.account, seen, len(own.store.records))
    parts, accounts, views, stores = [*own.parts], [own.account], [seen], [own.store]
    validation: Rows | None
    if held is None:
        assert not isinstance(data.validation, tuple)
        train, validation, said = split(seen.rows, data.validation, seed)
    else:
        other = view(held.store, size, data.overlong, tuple(1.0 for _ in held.parts), seed)
        train, validation = seen.rows, other.rows if len(other.rows) else None
        said = f"{len(other.rows):,} rows of {', '.join(p.path for p in held.parts)}"
        parts, accounts = [*parts, *held.parts], [*accounts, held.account]
        views, stores = [*views, other], [*stores, held.store]
    report = report_of(parts, accounts, views, stores, train, validation, said, size, why, facts)
    return Prepared(train, validation, report, size, own.name, len(units(validation)) if held is None else 0)


def tokens_key(folder: Path, chat_template: str | None, train_on: str) -> list[Any]:
    """All that changes tokens and labels beside the rows themselves."""
    given = template_text(None, chat_template) if chat_template else None
    return [VERSION, fingerprint(folder), given, train_on, _today(folder, given)]


def _today(folder: Path, given: str | None) -> str:
    """The date, when the template writes it into every row."""
    names = ("chat_template.jinja", "tokenizer_config.json") if given is None else ()
    texts = [given or "", *((folder / n).read_text(errors="replace") for n in names if (folder / n).exists())]
    return date.today().isoformat() if any("strftime_now" in text for text in texts) else ""


def refuse_preference(parts: Sequence[Part]) -> None:
    for part in parts:
        if part.format == "preference":
            raise DataError(
                f"'{part.path}' holds preference pairs (chosen, rejected)",
                "training here is supervised: it has one answer per prompt",
                "write the chosen answers as messages; look at the pairs with: shardwise data check",
            )


def _check_vocabulary(
    accounts: Sequence[Account], vocabulary: int | None, folder: Path, trust_remote_code: bool
) -> None:
    largest = max(a.largest_id for a in accounts)
    if vocabulary is None or largest < vocabulary:
        return
    tokenizer = shared_tokenizer(folder, trust_remote_code)
    raise DataError(
        f"the data hold token {tokenizer.full.convert_ids_to_tokens(largest)!r} with id {largest}",
        f"the model's embedding has {vocabulary} rows, ids 0 to {vocabulary - 1}",
        "take the tokenizer that belongs to the model, or resize the model's embedding and save it",
    )


def nothing_left(account: Account, seen: View, stored: int) -> DataError:
    read = sum(account.rows_read.values())
    if read == 0:
        return DataError("there are no rows", "the files are empty", "check what writes them")
    reasons = [f"{t.count} x {reason}" for reason, t in account.refused.items()]
    reasons += [f"{f.count} x {f.reason}" for f in seen.dropped]
    untrained = sum(f.count for f in seen.dropped if f.reason.startswith("no trainable"))
    what = (
        f"{untrained} of {read} rows have no trainable token"
        if untrained
        else f"none of {read} rows is usable"
    )
    places = [p for t in account.refused.values() for p in t.places[:1]] + [
        p for f in seen.dropped for p in f.places[:1]
    ]
    first = f"; the first is {places[0][0]} line {places[0][1]}" if places else ""
    hint = "raise data.sequence_length" if untrained else "see every reason with: shardwise data check"
    if any("chat template" in reason for reason in account.refused):
        hint = (
            f"name another template: model.chat_template: chatml, or one of {', '.join(shipped())}, or a file"
        )
    return DataError(f"{what}: nothing is left to train on", "; ".join(reasons) + first, hint)


def _facts(folder: Path, model: Path, given: str | None, trust_remote_code: bool) -> dict[str, str]:
    """What the template does with system turns; asked once, kept beside the store."""
    path = folder / "template.json"
    if path.exists():
        found: dict[str, str] = json.loads(path.read_text(encoding="utf-8"))
        return found
    found = template_facts(model, given, trust_remote_code)
    path.write_text(json.dumps(found), encoding="utf-8")
    return found


def template_facts(model: Path, given: str | None, trust_remote_code: bool) -> dict[str, str]:
    """What the template in use is called and does with system turns."""
    template = load_template(shared_tokenizer(model, trust_remote_code), given)
    return {
        "name": template.name,
        "system": template.system,
        "injected": template.injected,
        "end": template.end,
        "foreign": ", ".join(template.foreign),
    }


def _template(facts: dict[str, str]) -> str | None:
    if not facts.get("foreign"):
        return facts.get("name")
    return f"{facts['name']}; this tokenizer has no token for its {facts['foreign']}: they are written as plain text"


def _system(account: Sequence[Account], facts: dict[str, str]) -> str:
    """What happens to system turns, in words."""
    if not facts:
        return "no chats"
    chats = sum(a.chats for a in account)
    having = sum(a.with_system for a in account)
    kept = {
        "kept": "kept as system turns",
        "merged": "put before the first user turn, because the template takes no system turn",
    }[facts["system"]]
    text = f"{having:,} of {chats:,} chats have one: {kept}"
    if facts["injected"] and having < chats:
        text += f"; the others get the template's own: {facts['injected']!r}"
    return text


def report_of(
    parts: Sequence[Part],
    accounts: Sequence[Account],
    views: Sequence[View],
    stores: Sequence[Store],
    train: Rows,
    validation: Rows | None,
    said: str,
    length: int,
    why: str,
    facts: dict[str, str],
) -> DataReport:
    refused_in: dict[str, int] = {}
    rows_in: dict[str, int] = {}
    for account, store in zip(accounts, stores, strict=True):
        counts = np.bincount(np.asarray(store.records["file"]), minlength=len(store.files))
        for number, name in enumerate(store.files):
            rows_in[name] = rows_in.get(name, 0) + account.rows_read.get(name, 0)
            refused_in[name] = refused_in.get(name, 0) + account.rows_read.get(name, 0) - int(counts[number])
    files = [
        FileReport(f.name, p.format, rows_in[f.name], refused_in[f.name]) for p in parts for f in p.files
    ]
    texts = [sum(v.documents for v in views), sum(v.text_sequences for v in views)]
    ended = np.asarray(train.store.records["ended"])[train.base][train.groups < 0]
    whole = full_lengths(train.store)[train.base] == train.starts + train.lengths
    return DataReport(
        files=tuple(files),
        passed_over=tuple(name for p in parts for name in p.passed_over),
        rows_read=sum(sum(a.rows_read.values()) for a in accounts),
        rows_train=len(np.unique(train.base)),
        rows_validation=_held_out(train, validation),
        documents_train=len(np.unique(train.base[train.groups >= 0])),
        refused=_findings(a.refused for a in accounts),
        dropped=tuple(f for v in views for f in v.dropped),
        notes=_findings(a.notes for a in accounts),
        lengths=measure(np.concatenate([full_lengths(s) for s in stores])),
        sequence_length=length,
        sequence_length_why=why,
        truncated=sum(v.truncated for v in views),
        ended=int((ended.astype(bool) & whole[train.groups < 0]).sum()),
        tokens=int(train.lengths.sum()),
        trained_tokens=int(train.trained.sum()),
        duplicates=duplicates(train),
        overlap=overlap(train, validation) if validation is not None else 0,
        documents=texts[0],
        text_sequences=texts[1],
        template=_template(facts),
        system=_system(accounts, facts),
        validation=said,
        answers=sum(a.answers for a in accounts),
        rewritten=sum(a.rewritten for a in accounts),
    )


def _held_out(train: Rows, validation: Rows | None) -> int:
    """Rows as the files have them; a document of which a part is trained on counts there."""
    if validation is None:
        return 0
    held = np.unique(validation.base)
    return len(np.setdiff1d(held, train.base) if validation.store is train.store else held)


def _findings(tallies: Any) -> tuple[Finding, ...]:
    joined: dict[str, Tally] = {}
    for found in tallies:
        for reason, tally in found.items():
            both = joined.setdefault(reason, Tally())
            both.count += tally.count
            both.places += tally.places
    return tuple(
        Finding(reason, t.count, tuple((f, n) for f, n in t.places))
        for reason, t in sorted(joined.items(), key=lambda item: -item[1].count)
    )
