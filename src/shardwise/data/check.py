"""`shardwise data check`: everything about a data set that is cheaper to learn before training."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shardwise.data.build import Part, Progress, Tally, find_part
from shardwise.data.conversations import Message, RowProblem
from shardwise.data.formats import Preference, reader_of
from shardwise.data.order import make_order
from shardwise.data.preparation import prepare
from shardwise.data.readers import Row, read_rows
from shardwise.data.report import DataReport, Finding
from shardwise.data.samples import Sample, samples
from shardwise.data.tokenizer import shared_tokenizer, tokenizer_folder
from shardwise.errors import DataError
from shardwise.recipe.schema import Data


@dataclass(frozen=True)
class Check:
    """`sequences`: packed ones in an epoch; `efficiency`: their share of tokens that are no padding."""

    report: DataReport
    sequences: int
    efficiency: float
    samples: tuple[Sample, ...]

    def to_dict(self) -> dict[str, Any]:
        return {
            "report": self.report.to_dict(),
            "packing": {"sequences": self.sequences, "efficiency": self.efficiency},
            "samples": [asdict(s) for s in self.samples],
        }


@dataclass(frozen=True)
class PairCheck:
    """Preference pairs: read and compared, not tokenized."""

    files: tuple[str, ...]
    rows_read: int
    pairs: int
    refused: tuple[Finding, ...]
    longest_prompt_turns: int
    first: Preference | None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def check(
    data: Data,
    model: Path | str,
    *,
    revision: str | None = None,
    chat_template: str | None = None,
    max_length: int | None = None,
    vocabulary: int | None = None,
    seed: int = 0,
    cache: Path | None = None,
    rows: int = 3,
    progress: Progress | None = None,
) -> Check:
    """Prepare the data and look at them. Raises what `prepare` raises."""
    prepared = prepare(
        data,
        model,
        revision=revision,
        chat_template=chat_template,
        max_length=max_length,
        vocabulary=vocabulary,
        seed=seed,
        cache=cache,
        progress=progress,
    )
    order = make_order(
        prepared.train,
        sequence_length=prepared.sequence_length,
        packing=data.packing,
        global_batch_size=1,
        epochs=1,
        seed=seed,
    )
    shown = samples(prepared.train, shared_tokenizer(tokenizer_folder(model, revision)), rows) if rows else ()
    return Check(prepared.report, order.steps, order.efficiency, shown)


def check_pairs(parts: Sequence[Part]) -> PairCheck:
    """Read preference pairs and say what they share. Raises DataError when no row is a pair."""
    refused: dict[str, Tally] = {}
    read, pairs, turns = 0, 0, 0
    first: Preference | None = None
    parse = reader_of("preference")
    for part in parts:
        for file in part.files:
            for row in read_rows(file):
                read += 1
                try:
                    if not isinstance(row, Row):
                        raise RowProblem(row.reason)
                    found = parse(row.value)
                    assert isinstance(found, Preference)
                except RowProblem as problem:
                    refused.setdefault(str(problem), Tally()).add(file.name, row.line)
                    continue
                pairs += 1
                turns = max(turns, len(found.prompt))
                first = first or found
    findings = tuple(Finding(reason, t.count, tuple(t.places)) for reason, t in refused.items())
    if not pairs:
        reasons = "; ".join(f"{f.count} x {f.reason}" for f in findings)
        raise DataError(
            f"none of {read} rows is a preference pair", reasons, "each needs chosen and rejected"
        )
    return PairCheck(tuple(f.name for p in parts for f in p.files), read, pairs, findings, turns, first)


def preference_parts(data: Data) -> list[Part]:
    """The sources of `data` when all of them hold preference pairs; else nothing."""
    parts = [find_part(s.path, s.format, not data.streaming) for s in data.train]
    return parts if all(p.format == "preference" for p in parts) else []


def text_of_turns(turns: Sequence[Message]) -> str:
    return "\n".join(f"{m['role']}: {m['content']}" for m in turns)
