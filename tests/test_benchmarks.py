"""The tables in docs/benchmarks.md are those of the records they name."""

import json
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
RECORDS = re.findall(r"<!-- (peers-\S+\.json) -->\n", PAGE)


@pytest.mark.parametrize("name", RECORDS)
def test_a_table_in_the_docs_is_its_records(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    sys.modules.pop("table", None)
    import table

    record = json.loads((ROOT / "measurements" / name).read_text(encoding="utf-8"))
    shown = PAGE.split(f"<!-- {name} -->\n", 1)[1].split(f"\n<!-- end of {name} -->", 1)[0]
    assert shown == table.text(record)
    assert {run["round"] for run in record["runs"]} and "shardwise" in shown


def test_the_docs_show_at_least_one_record() -> None:
    assert RECORDS
