"""Quotes of today, from a stand-in for the gpuhunt package."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from shardwise.errors import MissingDependencyError, UsageError
from shardwise.facts.gpus import find_gpu, load_prices
from shardwise.facts.live_prices import with_live_rent


def item(name: str, memory: float, count: int, price: float, provider: str) -> Any:
    return SimpleNamespace(gpu_name=name, gpu_memory=memory, gpu_count=count, price=price, provider=provider)


def test_the_cheapest_instance_of_each_provider_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    items = [
        item("H100", 80, 8, 16.0, "one"),
        item("H100", 80, 1, 3.0, "one"),
        item("H100", 80, 8, 24.0, "two"),
        item("A100", 40, 1, 1.0, "two"),
        item("Z9000", 999, 1, 1.0, "two"),
        item("", 0, 0, 0.1, "two"),
    ]
    monkeypatch.setitem(sys.modules, "gpuhunt", SimpleNamespace(query=lambda **_: items))
    notes: list[str] = []
    prices = with_live_rent(load_prices(), notes)
    h100, a100 = prices.rent(find_gpu("H100-80GB")), prices.rent(find_gpu("A100-40GB"))
    assert h100 is not None
    assert a100 is not None
    assert (h100.low, h100.high, a100.typical) == (2.0, 3.0, 1.0)
    assert "2 GPUs" in notes[0]
    assert prices.rent(find_gpu("L4")) == load_prices().rent(find_gpu("L4"))


def test_without_the_package_the_hint_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gpuhunt", None)
    with pytest.raises(MissingDependencyError) as caught:
        with_live_rent(load_prices(), [])
    assert "pip install gpuhunt" in caught.value.hint


def test_a_failing_provider_is_a_usage_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(**_: Any) -> list[Any]:
        raise OSError("no network")

    monkeypatch.setitem(sys.modules, "gpuhunt", SimpleNamespace(query=fail))
    with pytest.raises(UsageError, match="live prices"):
        with_live_rent(load_prices(), [])
