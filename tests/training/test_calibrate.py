"""What `shardwise calibrate` measures is what the facts room reads."""

import pytest

from shardwise.facts.calibration import Calibration


def test_the_measurement_has_the_fields_plans_read(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    from shardwise.training import calibrate

    monkeypatch.setattr(calibrate, "_SECONDS", 0.01)
    monkeypatch.setattr(calibrate, "_SMALL", ((64, 64, 64),))
    monkeypatch.setattr(calibrate, "_LARGE", ((64, 64, 64),))
    found = Calibration(**calibrate.measure())  # type: ignore[arg-type]
    assert found.matrix_flops_per_second["fp32"] > 1e6
    assert found.bandwidth_bytes_per_second > 1e6
    assert 0 < found.op_seconds < 0.1
