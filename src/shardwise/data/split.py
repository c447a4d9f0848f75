"""Training rows and held-out rows, from one set."""

import numpy as np

from shardwise.data.store import Rows
from shardwise.errors import DataError

AUTO_SHARE, AUTO_MOST, AUTO_FROM = 0.05, 200, 20


def how_many(asked: int | float | str, available: int) -> tuple[int, str]:
    """(held-out rows, said in words). An integer counts rows, a share below 1 is a part of them.

    A share of anything gives at least one row, if one is left to train on. Raises DataError for a count that
    would leave nothing to train on.
    """
    if asked == "auto":
        count = min(AUTO_MOST, round(AUTO_SHARE * available)) if available >= AUTO_FROM else 0
        return count, (
            f"{count} of {available:,} rows (auto: 5 %, at most {AUTO_MOST})"
            if count
            else f"none: {available} rows are fewer than {AUTO_FROM} (auto)"
        )
    if isinstance(asked, str):
        raise DataError(f"data.validation = {asked}", "it is neither a count nor a share", "give 100 or 0.05")
    if isinstance(asked, float):
        if not 0 <= asked < 1:
            raise DataError(
                f"data.validation = {asked}",
                f"a share lies below 1; there are {available} rows",
                f"write {int(asked)} for a count, or 0.1 for a tenth",
            )
        count = max(1, round(asked * available)) if asked > 0 else 0
        if count >= available:
            return 0, f"none: {asked:g} of {available} row{'s' * (available != 1)} leaves nothing to train on"
        return (
            count,
            f"{count} of {available:,} rows ({asked:g} of them)" if count else "none (set in the recipe)",
        )
    if asked and asked >= available:
        raise DataError(
            f"data.validation = {asked} rows",
            f"there are {available} rows, and at least one must be left to train on",
            f"ask for {max(available - 1, 0)} or fewer, or for a share such as 0.1",
        )
    return asked, f"{asked} of {available:,} rows" if asked else "none (set in the recipe)"


def split(rows: Rows, asked: int | float | str, seed: int) -> tuple[Rows, Rows | None, str]:
    """(training rows, held-out rows or None, said in words).

    The unit is a row, or a whole sequence of continuous text. Rows that occur twice stay in training as long
    as there are others, so that no held-out row is also trained on.
    """
    digests = np.asarray(store_digests(rows))
    names, unit_of = np.unique(_unit_of(rows), return_inverse=True)
    count, said = how_many(asked, len(names))
    if count == 0:
        return rows, None, said
    _, of_digest, often = np.unique(digests, return_inverse=True, return_counts=True)
    twice = np.zeros(len(names), bool)
    alone = (often[of_digest] > 1) & (rows.groups < 0)
    twice[unit_of[alone]] = True
    shuffled = np.random.default_rng([seed, 3_000_017]).permutation(len(names))
    ranked = np.concatenate([shuffled[~twice[shuffled]], shuffled[twice[shuffled]]])
    held = np.isin(unit_of, ranked[:count])
    return rows.select(~held), rows.select(held), said


def _unit_of(rows: Rows) -> np.ndarray:
    """(N,) int64: a row's own number, or one below 0 for each full sequence of continuous text."""
    return np.where(rows.groups >= 0, -1 - rows.groups, np.arange(len(rows)))


def units(rows: Rows | None) -> np.ndarray:
    """The rows and full sequences that a split counts."""
    return np.zeros(0, np.int64) if rows is None else np.unique(_unit_of(rows))


def store_digests(rows: Rows) -> np.ndarray:
    """Hash of every row's tokens before cutting: (N,) uint64."""
    found: np.ndarray = np.asarray(rows.store.records["digest"])[rows.base]
    return found


def overlap(train: Rows, validation: Rows) -> int:
    """Held-out rows (not text) whose tokens are also those of a training row."""
    mine = validation.groups < 0
    return int(np.isin(store_digests(validation)[mine], store_digests(train)[train.groups < 0]).sum())


def duplicates(rows: Rows) -> int:
    """Rows (not text) beyond the first with the same tokens."""
    found = store_digests(rows)[rows.groups < 0]
    return len(found) - len(np.unique(found))
