"""Measured rates of this machine replace assumed ones, and only those of this machine."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from shardwise.facts.calibration import Calibration, calibration_path, load_calibration, save_calibration
from shardwise.facts.machine import calibrated, detect_machine

RATES = {"fp32": 2e11, "bf16": 6e11}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path))
    return tmp_path


def measured(threads: int) -> Calibration:
    import platform

    return Calibration(platform.node(), "cpu", threads, RATES, 5e10, 3e-6, 0.1, "2026-11-30")


def test_a_measurement_is_kept_and_found_again() -> None:
    assert load_calibration("cpu", 2) is None
    save_calibration(measured(2))
    assert load_calibration("cpu", 2) == measured(2)
    assert load_calibration("cpu", 8) is None  # other threads, other rates
    assert load_calibration("cuda", 2) is None


def test_another_host_s_or_a_broken_measurement_is_not_used(cache: Path) -> None:
    save_calibration(replace(measured(2), host="elsewhere"))
    assert load_calibration("cpu", 2) is None
    calibration_path().write_text("{")
    assert load_calibration("cpu", 2) is None
    calibration_path().write_text(json.dumps({"host": "x"}))
    assert load_calibration("cpu", 2) is None


def test_the_processor_takes_the_measured_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = replace(detect_machine(), gpus=(), device="cpu")
    before = machine.processor_as_device()
    assert not before.measured
    save_calibration(measured(machine.threads))
    after = machine.processor_as_device()
    assert after.measured
    assert after.peak_flops("fp32") == RATES["fp32"]
    assert after.sustained == 1.0
    assert "2026-11-30" in after.source


def test_a_card_keeps_the_vendor_s_peak_and_takes_the_measured_share() -> None:
    import platform

    from shardwise.facts.gpus import find_gpu

    gpu = find_gpu("A100-80GB")
    save_calibration(
        Calibration(platform.node(), "cuda", 8, {"fp32": 1e13, "bf16": 2.5e14}, 1.6e12, 4e-6, 0, "d")
    )
    after = calibrated(gpu, 8)
    assert after.peak_flops("bf16") == gpu.peak_flops("bf16")
    assert after.sustained == pytest.approx(2.5e14 / 312e12)


def test_measured_links_and_disk_replace_those_of_data_sheets() -> None:
    import platform

    from shardwise.facts.gpus import find_gpu

    gpu = find_gpu("A100-80GB")
    rates = {"fp32": 1e13, "bf16": 2.5e14}
    save_calibration(
        Calibration(
            platform.node(), "cuda", 8, rates, 1.6e12, 4e-6, 0, "d", disk_write_bytes_per_second=1e9,
            disk_read_bytes_per_second=2e9, host_bytes_per_second=17e9, link_bytes_per_second=170e9,
        )
    )  # fmt: skip
    after = calibrated(gpu, 8)
    assert (after.disk_read_bytes_per_second, after.disk_write_bytes_per_second) == (2e9, 1e9)
    assert after.pcie.bytes_per_second == pytest.approx(20e9)
    assert after.link.bytes_per_second == pytest.approx(200e9)


def test_threads_follow_omp_num_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert detect_machine().threads == 1
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert detect_machine().threads == detect_machine().cores
