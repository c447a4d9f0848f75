"""What `shardwise calibrate` measures is what the facts room reads."""

from pathlib import Path

import pytest

from shardwise.facts.calibration import Calibration


def test_the_measurement_has_the_fields_plans_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    pytest.importorskip("torch")
    from shardwise.training import calibrate

    monkeypatch.setattr(calibrate, "_SECONDS", 0.01)
    monkeypatch.setattr(calibrate, "_SMALL", ((64, 64, 64),))
    monkeypatch.setattr(calibrate, "_LARGE", ((64, 64, 64),))
    found = Calibration(**calibrate.measure())  # type: ignore[arg-type]
    assert found.matrix_flops_per_second["fp32"] > 1e6
    assert found.bandwidth_bytes_per_second > 1e6
    assert 0 < found.op_seconds < 0.1
    assert found.disk_write_bytes_per_second is not None and found.disk_write_bytes_per_second > 1e6
    assert found.disk_read_bytes_per_second is not None and found.disk_read_bytes_per_second > 1e6
    assert not list(tmp_path.iterdir())  # the test file is gone


def test_a_folder_that_cannot_be_written_leaves_the_disk_unknown(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from shardwise.training.calibrate import _disk

    unknown = {"disk_write_bytes_per_second": None, "disk_read_bytes_per_second": None}
    assert _disk(tmp_path / "nowhere") == unknown
