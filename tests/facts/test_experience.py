"""Finished runs of this machine sharpen its later estimates, and say so."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from shardwise.estimate.speed import estimate_speed, step_seconds
from shardwise.estimate.stack import Stack
from shardwise.facts.catalogue import catalogue_shape
from shardwise.facts.experience import experience_of, experience_path, remember
from shardwise.facts.machine import as_offer, detect_machine, pace_key


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path))
    return tmp_path


def finished(
    ratio: float, device: str = "CPU, 2 threads", rates: str = "this machine", steps: int = 50
) -> bool:
    return remember(device, 1, rates, "org/model", "lora", steps, 100.0, 100.0 * ratio)


def test_one_run_moves_the_estimate_half_the_way_and_many_nearly_all() -> None:
    assert experience_of("CPU, 2 threads", "this machine") is None
    finished(1.44)
    found = experience_of("CPU, 2 threads", "this machine")
    assert found is not None
    assert found.factor == pytest.approx(1.2)
    for _ in range(19):
        finished(1.44)
    found = experience_of("CPU, 2 threads", "this machine")
    assert found is not None
    assert found.factor == pytest.approx(1.44, rel=0.02)
    assert (found.runs, found.low, found.high) == (20, 1.44, 1.44)
    assert "20 finished runs on this machine took 1.44 to 1.44 of the estimate" in found.words


def test_only_runs_of_this_device_these_rates_and_this_host_count() -> None:
    finished(2.0, device="RTX4090")
    finished(2.0, rates="measured here on 2020-01-01")
    path = experience_path()
    elsewhere = json.loads(path.read_text().splitlines()[0]) | {
        "host": "elsewhere",
        "device": "CPU, 2 threads",
    }
    path.write_text(path.read_text() + json.dumps(elsewhere) + "\n{cut o")
    assert experience_of("CPU, 2 threads", "this machine") is None
    assert experience_of("RTX4090", "this machine") is not None


def test_runs_too_short_to_tell_are_not_kept() -> None:
    assert not finished(1.5, steps=9)
    assert not remember("CPU, 2 threads", 1, "this machine", "m", "lora", 50, 3.0, 4.9)
    assert not experience_path().exists()


def test_a_plan_for_this_machine_takes_it_and_says_so() -> None:
    machine = replace(detect_machine(), gpus=(), device="cpu")
    before = as_offer("cpu").gpu
    remember(pace_key(before, machine.threads), 1, before.source, "org/model", "lora", 50, 100.0, 400.0)
    offer = as_offer("cpu")
    shape = catalogue_shape("HuggingFaceTB/SmolLM2-135M")
    assert shape is not None
    stack = Stack(precision="fp32", device="cpu", sequence_length=512)
    slow, fast = estimate_speed(shape, offer.gpu, stack), estimate_speed(shape, before, stack)
    assert slow.step_seconds == pytest.approx(2 * fast.step_seconds)
    assert slow.high_seconds == pytest.approx(2 * fast.high_seconds)
    assert step_seconds(shape, offer.gpu, stack) == pytest.approx(slow.step_seconds)
    assert sum(p.seconds for p in slow.parts) == pytest.approx(slow.step_seconds)
    assert any("1 finished run on this machine took 4.00 of the estimate" in note for note in offer.notes)


def test_calibrate_forget_deletes_both(cache: Path) -> None:
    from click.testing import CliRunner

    from shardwise.cli.calibrate import calibrate

    finished(1.5)
    (cache / "machine.json").write_text("{}")
    done = CliRunner().invoke(calibrate, ["--forget"], catch_exceptions=False)
    assert done.exit_code == 0
    assert not experience_path().exists() and not (cache / "machine.json").exists()
    assert str(experience_path()) in done.output
