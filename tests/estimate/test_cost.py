"""Money and energy, always with their range."""

import pytest

from shardwise.estimate.cost import energy_kwh, estimate_cost
from shardwise.facts.gpus import Prices, load_prices, parse_offer


def test_rent_is_gpu_hours_at_the_quotes() -> None:
    prices = Prices(
        {"H100-80GB": {"rent": [{"usd_per_hour": u, "source": "s", "date": "d"} for u in (2.0, 3.0, 7.0)]}},
        {},
    )
    cost = estimate_cost(parse_offer("8xH100-80GB"), 3600, 1800, 7200, prices)
    assert cost is not None
    assert (cost.low_usd, cost.usd, cost.high_usd) == (8.0, 24.0, 112.0)
    assert "s 2.00 (d)" in cost.source


def test_a_card_without_price_has_no_cost() -> None:
    assert estimate_cost(parse_offer("8xH100-80GB"), 1, 1, 1, Prices({}, {})) is None


def test_buying_spreads_the_purchase() -> None:
    prices = load_prices()
    rent = estimate_cost(parse_offer("8xH100-80GB"), 3600, 3600, 3600, prices)
    own = estimate_cost(parse_offer("8xH100-80GB"), 3600, 3600, 3600, prices, buy=True)
    assert rent is not None
    assert own is not None
    assert own.purchase_usd == pytest.approx(8 * 30_000 * 1.35)
    assert own.usd != rent.usd


def test_energy_is_power_times_time_with_the_host() -> None:
    assert energy_kwh(parse_offer("8xH100-80GB"), 3600) == pytest.approx(8 * 0.7 * 0.85 * 1.35)
