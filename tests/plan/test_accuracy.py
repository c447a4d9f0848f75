"""Both estimates against public measured runs: the errors may not get worse than these bounds.

inputs/measured_runs.csv holds facts from the files and tables that its columns source and source_path name.
"""

import os
import re
from functools import cache
from pathlib import Path

import pytest

from shardwise.plan.accuracy import Score, score_memory, score_throughput
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


@cache
def memory() -> Score:
    return score_memory(read_rows(TABLE))


def test_the_median_error_of_memory_is_within_2_percent() -> None:
    found = memory()
    assert len(found.compared) >= 200
    assert found.median_signed is not None
    assert found.median_absolute is not None
    assert abs(found.median_signed) < 0.02
    assert found.median_absolute < 0.05


def test_nine_of_ten_memory_rows_are_within_15_percent() -> None:
    found = memory().p90_absolute
    assert found is not None
    assert found < 0.15


def test_at_most_one_memory_row_in_ten_is_declined() -> None:
    found = memory()
    assert len(found.declined) <= 0.1 * (len(found.declined) + len(found.compared))


def test_programs_whose_step_is_known_have_a_median_within_3_percent() -> None:
    parts = memory().by(lambda row: row.text("source"))
    for source in ("fmsaccel", "msswift", "litgpt", "torchtitan", "qwen"):
        found = parts[source].median_signed
        assert found is not None
        assert abs(found) < 0.03, source


def test_runs_that_went_out_of_memory_are_not_called_a_sure_fit() -> None:
    rows = memory().out_of_memory
    assert len(rows) >= 20
    assert [o.row.id for o in rows if not o.passed] == []


@pytest.mark.parametrize("name", ["memory", "throughput"])
def test_the_table_in_the_docs_is_this_score(name: str) -> None:
    """Write it anew with SHARDWISE_WRITE_GOLDEN=1."""
    file = Path(__file__).parents[2] / "docs" / "accuracy.md"
    text = file.read_text()
    found = re.search(rf"(<!-- {name}: .*? -->\n)(.*?)(<!-- end -->)", text, flags=re.S)
    assert found is not None
    groups = (
        ("method", "sharding", "memory kind", "source") if name == "memory" else ("method", "GPU", "source")
    )
    table = markdown_table(memory() if name == "memory" else score(), groups) + "\n"
    if os.environ.get("SHARDWISE_WRITE_GOLDEN"):
        file.write_text(text[: found.start(2)] + table + text[found.end(2) :])
    else:
        assert found[2] == table
