"""Offers, names, prices."""

import json
from pathlib import Path

import pytest

from shardwise.errors import UnknownNameError, UsageError
from shardwise.facts.gpus import catalogue, find_gpu, find_link, load_prices, parse_offer, with_network


@pytest.mark.parametrize(
    ("text", "name", "nodes", "per_node"),
    [
        ("8xH100-80GB", "8xH100-80GB", 1, 8),
        ("H100", "1xH100-80GB", 1, 1),
        ("2x8xH100", "16xH100-80GB", 2, 8),
        ("16 x A100-80GB", "16xA100-80GB", 2, 8),
        ("RTX 4090", "1xRTX4090", 1, 1),
        ("2x4090", "2xRTX4090", 1, 2),
        ("1x A100 40GB", "1xA100-40GB", 1, 1),
        ("NVIDIA GeForce RTX 3090", "1xRTX3090", 1, 1),
        ("4×L40S", "4xL40S", 1, 4),
    ],
)
def test_offers_are_read_as_people_write_them(text: str, name: str, nodes: int, per_node: int) -> None:
    offer = parse_offer(text)
    assert (offer.name, offer.nodes, offer.gpus_per_node) == (name, nodes, per_node)


def test_a_short_name_says_which_card_it_was_taken_for() -> None:
    assert "A100-80GB" in parse_offer("A100").notes[0]
    assert parse_offer("A100-80GB").notes == ()


def test_an_unknown_card_is_an_error_with_the_nearest_names() -> None:
    with pytest.raises(UnknownNameError) as caught:
        parse_offer("8xH1000")
    assert "H100-80GB" in caught.value.hint


@pytest.mark.parametrize("text", ["", "x", "0xH100", "8x", "eight H100", "-1xH100"])
def test_what_is_no_offer_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_offer(text)


def test_counts_that_fill_no_node_are_refused_with_those_that_do() -> None:
    with pytest.raises(UsageError) as caught:
        parse_offer("12xH100-80GB")
    assert "8 or 16" in caught.value.hint
    assert parse_offer("12xH100-80GB", nodes=3).gpus_per_node == 4


def test_m12_memory_is_bytes_below_the_vendor_s_name() -> None:
    h100 = find_gpu("H100-80GB")
    assert h100.nominal_bytes == 80 * 10**9
    assert 79 * 2**30 < h100.usable_bytes < 80 * 2**30
    assert find_gpu("A100-80GB").usable_bytes == 80 * 2**30  # 81,920 MiB as the driver shows
    for gpu in catalogue().values():
        assert gpu.usable_bytes <= 1.075 * gpu.nominal_bytes  # never a decimal name read as GiB and more


def test_every_card_has_a_source_and_sane_figures() -> None:
    for gpu in catalogue().values():
        assert gpu.source
        assert 1e13 < gpu.peak_flops("bf16") < 3e15
        assert gpu.peak_flops("bf16") > gpu.peak_flops("fp32") or gpu.capability == "7.0"
        assert 0.3 < gpu.sustained <= 1.0
        assert gpu.link.bytes_per_second >= gpu.pcie.bytes_per_second * 0.9


def test_turing_and_volta_have_no_bf16() -> None:
    assert not find_gpu("T4").has_bf16
    assert find_gpu("A100").has_bf16


def test_another_network_between_nodes() -> None:
    offer = with_network(parse_offer("16xH100-80GB"), "eth-25")
    assert offer.gpu.network.bytes_per_second == find_link("eth-25").bytes_per_second
    with pytest.raises(UnknownNameError):
        find_link("eth-26")


def test_prices_carry_range_source_and_date() -> None:
    price = load_prices().rent(find_gpu("H100-80GB"))
    assert price is not None
    assert price.low <= price.typical <= price.high
    assert "2025" in price.source


def test_own_prices_replace_the_built_in_ones(tmp_path: Path) -> None:
    file = tmp_path / "prices.json"
    file.write_text(json.dumps({"gpus": {"H100": {"rent": [{"usd_per_hour": 1.5}]}}}))
    prices = load_prices(str(file))
    price = prices.rent(find_gpu("H100-80GB"))
    assert price is not None
    assert (price.low, price.typical, price.high) == (1.5, 1.5, 1.5)
    assert prices.rent(find_gpu("A100-80GB")) == load_prices().rent(find_gpu("A100-80GB"))


@pytest.mark.parametrize(
    "content",
    ["{", "[]", '{"gpus": {"H100": {"rent": [{}]}}}', '{"gpus": {"H100": {"rent": [{"usd_per_hour": -1}]}}}'],
)
def test_a_broken_price_file_is_refused(tmp_path: Path, content: str) -> None:
    file = tmp_path / "prices.json"
    file.write_text(content)
    with pytest.raises(UsageError, match="prices"):
        load_prices(str(file))


def test_owning_spreads_the_price_over_use_and_adds_power() -> None:
    prices, gpu = load_prices(), find_gpu("H100-80GB")
    own = prices.own(gpu)
    assert own is not None
    hours = 3 * 8766 * 0.6
    assert own.typical == pytest.approx(30_000 * 1.35 / hours + 0.7 * 1.3 * 0.12)
