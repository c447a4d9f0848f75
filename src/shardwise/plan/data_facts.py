"""How much text a training file holds, counted without a tokenizer."""

from pathlib import Path

from shardwise.errors import DataError
from shardwise.plan.model import DataFacts

# Characters of JSON per token over English chat data and common tokenizers: 3 to 4.5, quotes and keys included.
CHARACTERS_PER_TOKEN = 4.0


def facts_of_file(path: str) -> tuple[DataFacts, str]:
    """Rows and about how many tokens a file holds; and a note that says how that was counted.

    Raises DataError for a file that is not there or empty.
    """
    file = Path(path)
    if not file.is_file():
        raise DataError(
            f"data file '{path}' does not exist",
            "no such file",
            "give a file, or the number of tokens: --tokens 10M",
        )
    rows, longest, total = 0, 0, 0
    with file.open("rb") as lines:
        for line in lines:
            size = len(line.strip())
            if size:
                rows, longest, total = rows + 1, max(longest, size), total + size
    if not total:
        raise DataError(f"data file '{path}' is empty", "it holds no rows", "give a file with training rows")
    tokens = int(total / CHARACTERS_PER_TOKEN)
    note = (
        f"{path}: {rows:,} rows, {total:,} bytes; tokens are counted as bytes / {CHARACTERS_PER_TOKEN:g} "
        "(3 to 4.5 is usual): `shardwise data` counts them with the model's tokenizer"
    )
    longest_tokens = int(longest / CHARACTERS_PER_TOKEN) if file.suffix != ".json" else None
    return DataFacts(tokens, rows, longest_tokens, name=file.name), note
