"""The rules of thumb in docs/memory.md are what the estimator says now, and near what the field says."""

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

FILE = Path(__file__).parents[1] / "docs" / "thumb.py"


@pytest.fixture(scope="module")
def thumb() -> Any:
    spec = importlib.util.spec_from_file_location("thumb", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_shows_what_the_estimator_says(thumb: Any) -> None:
    """Written anew with: python docs/refresh.py"""
    page = thumb.PAGE.read_text()
    assert page.count(thumb.BEGIN) == page.count(thumb.END) == 1
    assert page == thumb.renewed(page)


# rule, a pattern in what the estimator says about it, and the range that the rule of thumb allows
RANGES = [
    ("7B full", r"= 12 bytes x \S+ = (\S+) GB", 78, 90),
    ("7B full", r"= 16 bytes: (\S+) GB", 104, 118),
    ("70B full", r"12 bytes x \S+ = (\S+) GB", 800, 880),
    ("LoRA at 7B", r"(\S+) GB for 512 tokens", 13, 18),
    ("LoRA at 7B", r"(\S+) GB for 4,096", 14, 18),
    ("QLoRA at 7B", r"(\S+) GB for 4,096", 6, 10),
    ("ZeRO-1", r"(\S+)x on 64", 3.5, 4.0),
    ("ZeRO-2", r"(\S+)x on 64", 7.0, 8.0),
    ("ZeRO-3", r"(\S+)x on 64", 63.5, 64.5),
]


@pytest.mark.parametrize("rule, pattern, low, high", RANGES, ids=[f"{r}-{p}" for r, p, *_ in RANGES])
def test_each_rule_is_derived(thumb: Any, rule: str, pattern: str, low: float, high: float) -> None:
    (derivation,) = [says for name, says, _ in thumb.rules() if name.startswith(rule)]
    found = re.search(pattern, derivation)
    assert found is not None, derivation
    assert low <= float(found[1].replace(",", "")) <= high, derivation
