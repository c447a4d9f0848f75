"""One hash for a model's weights, whatever files they are split into: is this the base that was trained on?"""

import hashlib
import struct
from pathlib import Path
from typing import Any

from shardwise.facts.headers import read_header

SAMPLE_BYTES = 4096  # of the beginning, the middle and the end of every tensor


def weights_digest(folder: Path) -> str:
    """Hash over name, dtype, shape and samples of the content of every tensor; "none" without safetensors.

    Independent of how tensors are spread over files. Reads at most 12 KiB a tensor, so that it costs a
    second for any model: it tells two models apart, and does not find a flipped bit (checksums do).
    """
    where: dict[str, tuple[Path, dict[str, Any]]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        if not path.name.startswith("adapter"):
            where.update({name: (path, entry) for name, entry in read_header(path).items()})
    if not where:
        return "none"
    found = hashlib.sha256()
    bases: dict[Path, int] = {}
    for name, (path, entry) in sorted(where.items()):
        found.update(f"{name} {entry['dtype']} {entry['shape']}\n".encode())
        with path.open("rb") as file:
            if path not in bases:
                bases[path] = 8 + struct.unpack("<Q", file.read(8))[0]
            begin, end = entry["data_offsets"]
            for start in sorted({begin, (begin + end) // 2, max(begin, end - SAMPLE_BYTES)}):
                file.seek(bases[path] + start)
                found.update(file.read(min(SAMPLE_BYTES, end - start)))
    return found.hexdigest()[:16]
