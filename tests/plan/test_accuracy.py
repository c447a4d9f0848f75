"""The time estimate against public measured runs: the errors may not get worse than these bounds.

inputs/measured_runs.csv holds facts from the files and tables that its columns source and source_path name.
"""

import os
import re
from functools import cache
from pathlib import Path

import pytest

from shardwise.plan.accuracy import Score, score_throughput
from shardwise.plan.rows import read_rows
from shardwise.report.accuracy_text import accuracy_json, accuracy_text, markdown_table

TABLE = Path(__file__).parent / "inputs" / "measured_runs.csv"


@cache
def score() -> Score:
    return score_throughput(read_rows(TABLE))


def test_the_median_error_of_throughput_is_within_12_percent() -> None:
    found = score()
    assert len(found.compared) >= 165
    assert found.median_absolute is not None
    assert found.median_signed is not None
    assert found.median_absolute < 0.12
    assert abs(found.median_signed) < 0.05


def test_nine_of_ten_rows_are_within_30_percent() -> None:
    found = score().p90_absolute
    assert found is not None
    assert found < 0.30


def test_the_printed_range_covers_nine_of_ten() -> None:
    found = score().range_coverage
    assert found is not None
    assert found >= 0.90


def test_no_gpu_kind_is_biased_by_more_than_5_percent() -> None:
    for name, part in score().by(lambda row: row.gpu.name if row.gpu else "").items():
        assert part.median_signed is not None
        assert abs(part.median_signed) < 0.05, name


def test_only_setups_that_are_no_engine_here_are_declined() -> None:
    allowed = ("parallelism", "not offered", "not in the catalogue")
    assert all(any(word in reason for word in allowed) for _, reason in score().declined)


@pytest.mark.parametrize("worst", [0, 3])
def test_the_score_prints_as_text_and_json(worst: int) -> None:
    memory = Score((), ())
    text = accuracy_text(memory, score(), worst)
    assert "throughput: 17" in text
    assert text.count("measured") == worst
    found = accuracy_json(memory, score())["throughput"]
    assert found["scored"] == len(score().compared) == len(found["rows"])
    assert found["groups"]["GPU"]


def test_the_table_in_the_docs_is_this_score() -> None:
    """Write it anew with SHARDWISE_WRITE_GOLDEN=1."""
    file = Path(__file__).parents[2] / "docs" / "accuracy.md"
    text = file.read_text()
    found = re.search(r"(<!-- throughput: .*? -->\n)(.*?)(\n<!-- end -->)", text, flags=re.S)
    assert found is not None
    table = markdown_table(score())
    if os.environ.get("SHARDWISE_WRITE_GOLDEN"):
        file.write_text(text[: found.start(2)] + table + text[found.end(2) :])
    else:
        assert found[2] == table
