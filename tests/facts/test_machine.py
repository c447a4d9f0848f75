"""This machine, and what drivers call cards."""

import subprocess
from typing import Any

import pytest

from shardwise.errors import UnknownNameError, UsageError
from shardwise.facts import machine as module
from shardwise.facts.machine import as_offer, detect_machine, identify_gpu

GIB = 2**30


@pytest.mark.parametrize(
    ("driver", "gib", "name"),
    [
        ("NVIDIA A100-SXM4-80GB", 80, "A100-80GB"),
        ("NVIDIA A100-SXM4-40GB", 40, "A100-40GB"),
        ("NVIDIA A100 80GB PCIe", 80, "A100-PCIe-80GB"),
        ("NVIDIA H100 80GB HBM3", 79.6, "H100-80GB"),
        ("NVIDIA H100 PCIe", 79.6, "H100-PCIe-80GB"),
        ("NVIDIA H200", 140.4, "H200"),
        ("NVIDIA GeForce RTX 4090", 24, "RTX4090"),
        ("Tesla T4", 15, "T4"),
        ("NVIDIA L40S", 45, "L40S"),
        ("NVIDIA RTX A6000", 48, "RTX-A6000"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 95.6, "RTX-PRO-6000"),
    ],
)
def test_cards_are_known_by_the_driver_s_name(driver: str, gib: float, name: str) -> None:
    assert identify_gpu(driver, int(gib * GIB)).name == name


def test_an_unknown_card_is_not_guessed() -> None:
    with pytest.raises(UnknownNameError):
        identify_gpu("NVIDIA Z9000", 300 * GIB)


def test_this_machine_has_cores_memory_and_a_device() -> None:
    machine = detect_machine()
    assert machine.cores >= 1
    assert 0 < machine.available_bytes <= machine.memory_bytes
    assert machine.free_disk_bytes > 0
    assert machine.device in ("cpu", "mps", "cuda")
    assert machine.flops_per_second("fp32") > 1e9


def fake_smi(monkeypatch: pytest.MonkeyPatch, lines: str) -> None:
    def run(*args: Any, **kwargs: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(args, 0, stdout=lines)

    monkeypatch.setattr(module.shutil, "which", lambda name: "/usr/bin/nvidia-smi")
    monkeypatch.setattr(module.subprocess, "run", run)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_gpus_of_nvidia_smi_become_the_offer(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_smi(monkeypatch, "NVIDIA GeForce RTX 4090, 24564\nNVIDIA GeForce RTX 4090, 24564\n")
    offer = detect_machine().offer()
    assert offer.name == "2xRTX4090"
    assert offer.gpu.usable_bytes == 24564 * 2**20


def test_visible_devices_are_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_smi(monkeypatch, "NVIDIA GeForce RTX 4090, 24564\nNVIDIA GeForce RTX 4090, 24564\n")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert detect_machine().offer().count == 1


def test_a_card_outside_the_catalogue_is_left_out_aloud(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_smi(monkeypatch, "NVIDIA Z9000, 300000\n")
    machine = detect_machine()
    assert machine.gpus == ()
    assert "Z9000" in machine.notes[0]


def test_the_processor_can_be_planned_for() -> None:
    offer = as_offer("cpu")
    assert offer.gpu.kind == "cpu"
    assert offer.gpu.usable_bytes == detect_machine().memory_bytes
    with pytest.raises(UsageError):
        as_offer("cpu", nodes=2)
