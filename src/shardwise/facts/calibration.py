"""Rates measured on this machine by `shardwise calibrate`, kept in the cache folder, used by every later plan."""

import json
import os
import platform
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

VERSION = 2


@dataclass(frozen=True, slots=True)
class Calibration:
    """What one device of this machine really reaches. `busy` is the load of the machine while it was measured.

    `matrix_flops_per_second` by precision: large products as a training step has them. `op_seconds`: time the host
    needs to issue one small operation. The disk is that of the folder where it was measured; `host_bytes_per_second`
    goes from pinned memory to a GPU, `link_bytes_per_second` from one GPU to the next. None: there is none.
    """

    host: str
    device: str
    threads: int
    matrix_flops_per_second: dict[str, float]
    bandwidth_bytes_per_second: float
    op_seconds: float
    busy: float
    measured: str  # date
    disk_write_bytes_per_second: float | None = None
    disk_read_bytes_per_second: float | None = None
    host_bytes_per_second: float | None = None
    link_bytes_per_second: float | None = None
    version: int = VERSION


def calibration_path() -> Path:
    """Where the measurement of this machine lies."""
    base = os.environ.get("SHARDWISE_CACHE") or os.environ.get("XDG_CACHE_HOME")
    folder = Path(base) if base else Path.home() / ".cache"
    return (folder if os.environ.get("SHARDWISE_CACHE") else folder / "shardwise") / "machine.json"


def save_calibration(calibration: Calibration) -> Path:
    """Write it, replacing an older one in one step."""
    path = calibration_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(asdict(calibration), indent=1), encoding="utf-8")
    part.replace(path)
    return path


def load_calibration(device: str, threads: int) -> Calibration | None:
    """The measurement of this machine, this device and as many threads; None where there is none that holds."""
    try:
        values: dict[str, Any] = json.loads(calibration_path().read_text(encoding="utf-8"))
        found = Calibration(**values)
    except (OSError, ValueError, TypeError):
        return None
    same = found.host == platform.node() and found.device == device and found.version == VERSION
    return found if same and (device != "cpu" or found.threads == threads) else None
