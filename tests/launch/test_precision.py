"""Precision on a processor is measured once, in under a second, and the plan says what was found."""

import platform
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest

from shardwise.facts.machine import as_offer, detect_machine
from shardwise.facts.model import read_model
from shardwise.facts.precision import MatrixRates, load_rates, save_rates
from shardwise.launch import precision
from shardwise.plan.resolve import resolve
from shardwise.recipe import parse_recipe

RECIPE = "model: HuggingFaceTB/SmolLM2-135M\ndata: rows.jsonl\nengine: {device: cpu}\n"


def rates(fp32: float, bf16: float) -> MatrixRates:
    threads = detect_machine().threads
    return MatrixRates(platform.node(), threads, version("torch"), fp32, bf16, 0.4, "2026-11-30")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path))


def test_it_is_measured_once_and_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = parse_recipe(RECIPE)
    probe = precision.Probe(recipe)
    probe.collect()
    found = load_rates(detect_machine().threads, version("torch"))
    assert found is not None and found.seconds < 1.5 and found.fp32_flops_per_second > 1e9
    assert found.bandwidth_bytes_per_second is not None and found.bandwidth_bytes_per_second > 1e9
    monkeypatch.setattr(precision.subprocess, "Popen", lambda *_, **__: pytest.fail("measured again"))
    precision.Probe(recipe).collect()
    monkeypatch.setattr(precision, "_known", lambda _: False)
    precision.Probe(parse_recipe(RECIPE + "training: {precision: fp32}\n")).collect()  # nothing to decide


@pytest.mark.parametrize(("bf16", "expected"), [(90e9, "fp32"), (350e9, "bf16")])
def test_the_faster_one_is_taken_and_the_plan_says_what_was_measured(bf16: float, expected: str) -> None:
    save_rates(rates(100e9, bf16))
    recipe = parse_recipe(RECIPE)
    decided, plan = resolve(recipe, read_model(recipe.model.source), as_offer("cpu"))
    assert decided.training.precision == expected
    why = next(c.why for c in plan.choices if c.key == "training.precision")
    assert f"{bf16 / 1e9:.0f} GFLOP/s in bf16, 100 in fp32" in why and "2026-11-30" in why


def test_a_plans_time_goes_by_what_was_measured() -> None:
    assumed = detect_machine().processor_as_device()
    save_rates(replace(rates(100e9, 350e9), bandwidth_bytes_per_second=40e9))
    device = detect_machine().processor_as_device()
    assert device.flops_per_second["fp32"] * device.sustained == 100e9
    assert device.bandwidth_bytes_per_second == 50e9 and not device.measured  # 80 % of a vendor's figure
    save_rates(rates(100e9, 350e9))  # as older versions wrote it
    older = detect_machine().processor_as_device()
    assert older.bandwidth_bytes_per_second == assumed.bandwidth_bytes_per_second


def test_a_measurement_of_another_torch_or_a_broken_file_is_not_used(tmp_path: Path) -> None:
    save_rates(rates(1.0, 2.0))
    assert load_rates(detect_machine().threads, "0.0") is None
    (tmp_path / "precision.json").write_text("{")
    assert load_rates(detect_machine().threads, version("torch")) is None
