"""One number for the rows a run trains on, so that a resumed run can tell whether they are the same."""

import hashlib

from shardwise.data.preparation import Prepared
from shardwise.data.store import Rows


def train_digest(prepared: Prepared) -> str:
    """`rows_digest` of the training rows; of a stream, the hash of its files' names and sizes and its settings."""
    return rows_digest(prepared.train) if prepared.stream is None else f"stream-{prepared.stream.digest[:16]}"


def rows_digest(rows: Rows | None) -> str:
    """Hash over tokens, cuts and labels of all rows in their order; "none" for no rows.

    The store keeps a digest of each row's tokens, so this reads 8 bytes a row and never the tokens.
    """
    if rows is None or len(rows) == 0:
        return "none"
    found = hashlib.sha256()
    for part in (rows.store.records["digest"][rows.base], rows.starts, rows.lengths, rows.trained):
        found.update(part.tobytes())
    return found.hexdigest()[:16]
