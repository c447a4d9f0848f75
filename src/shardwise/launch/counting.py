"""Training rows for a plan: counted with the model's own tokenizer where it is at hand, else by bytes."""

# Tokenizers and arrays are imported when rows are counted with them: a plan without them needs neither.
# ruff: noqa: PLC0415

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from shardwise.errors import MissingDependencyError, ModelError
from shardwise.facts.model import ModelShape
from shardwise.plan.data_facts import facts_of_file
from shardwise.plan.model import DataFacts
from shardwise.recipe import Recipe


def count_rows(
    model: str,
    revision: str | None,
    shape: ModelShape,
    path: str,
    sequence_length: int,
    epochs: float,
    progress: Callable[[str, int, int | None], None] | None = None,
) -> tuple[DataFacts, str]:
    """What a plan knows about a file, and a note that says how it was counted.

    With a tokenizer on this machine the rows are prepared as `shardwise train` prepares them (and kept in the same
    cache), so steps are the trainer's own. Otherwise tokens are estimated from bytes, and the note says so.
    Raises DataError for a file that is not there, or whose rows are of no known form.
    """
    folder = _tokenizer_at_hand(model, revision)
    if folder is None:
        facts, note = facts_of_file(path)
        return facts, f"{note}. The tokenizer of {model} is not on this machine"
    recipe = Recipe.model_validate(
        {
            "model": {"source": model, "revision": revision},
            "data": {"train": path, "sequence_length": sequence_length},
            "training": {"epochs": epochs},
        }
    )
    try:
        from shardwise.launch.job import facts_of, prepare_rows

        prepared = prepare_rows(recipe, folder, shape, progress)
    except (ImportError, MissingDependencyError, ModelError) as problem:
        facts, note = facts_of_file(path)
        return facts, f"{note}. Not counted with the tokenizer: {getattr(problem, 'what', problem)}"
    found, report = facts_of(prepared, recipe), prepared.report
    assert found.sequences_at is not None and found.steps_at is not None
    facts = replace(
        found,
        sequences_at=lru_cache(maxsize=64)(found.sequences_at),
        steps_at=lru_cache(maxsize=256)(found.steps_at),
        name=Path(path).name,
    )
    left_out = report.rows_refused + report.rows_dropped
    return facts, (
        f"{path}: {facts.tokens:,} tokens in {facts.rows:,} training rows, counted with the model's tokenizer; "
        f"{report.rows_validation:,} rows held out" + (f", {left_out:,} not usable" if left_out else "")
    )


_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model")


def _tokenizer_at_hand(model: str, revision: str | None) -> Path | None:
    """The local folder with the model's tokenizer: given, or in the hub's cache. Nothing is fetched."""
    folder = Path(model).expanduser()
    if folder.is_file():
        folder = folder.parent
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        try:
            folder = Path(snapshot_download(model, revision=revision, local_files_only=True))
        except Exception:  # not an id, not in the cache, no cache
            return None
    return folder if any((folder / name).is_file() for name in _TOKENIZERS) else None
