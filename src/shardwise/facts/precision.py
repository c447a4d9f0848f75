"""Which precision this machine's processor multiplies faster in: measured once per torch version and thread count."""

import json
import os
import platform
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from shardwise.facts.calibration import calibration_path


@dataclass(frozen=True, slots=True)
class MatrixRates:
    """FLOPs per second of matrix products as a training step has them, in fp32 and bf16; `seconds` it took.

    They choose the precision. A plan's time goes by them, and by `bandwidth_bytes_per_second` of large sums, until
    `shardwise calibrate` has measured longer.
    """

    host: str
    threads: int
    torch: str
    fp32_flops_per_second: float
    bf16_flops_per_second: float
    seconds: float
    measured: str  # date
    bandwidth_bytes_per_second: float | None = None

    @property
    def faster(self) -> str:
        """bf16 where it is not slower: it takes half the memory."""
        return "bf16" if self.bf16_flops_per_second >= self.fp32_flops_per_second else "fp32"


def rates_path() -> Path:
    """Where the measurement lies: beside that of `shardwise calibrate`."""
    return calibration_path().with_name("precision.json")


def save_rates(rates: MatrixRates) -> None:
    """Write it, replacing an older one in one step. A cache that cannot be written costs the next run a second."""
    path = rates_path()
    part = path.with_suffix(f".{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps(asdict(rates), indent=1), encoding="utf-8")
        part.replace(path)
    except OSError:
        part.unlink(missing_ok=True)


def load_rates(threads: int, torch: str | None) -> MatrixRates | None:
    """The measurement of this machine with this torch and as many threads; None where there is none."""
    try:
        found = MatrixRates(**json.loads(rates_path().read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None
    return found if (found.host, found.threads, found.torch) == (platform.node(), threads, torch) else None


def rates_here(threads: int) -> MatrixRates | None:
    """The measurement of this machine with the torch that is installed; None, too, where none is."""
    try:
        return load_rates(threads, version("torch"))
    except PackageNotFoundError:
        return None
