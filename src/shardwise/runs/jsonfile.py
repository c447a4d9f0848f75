"""JSON on disk: whole files that are never half-written, and lines that survive a crash.

NaN and infinity are not JSON. They are written as the strings "NaN", "Infinity" and "-Infinity", which the
typed records read back as numbers, so that a diverged run still leaves files every JSON reader takes.
"""

import json
import math
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any


def to_json(value: Any, indent: int | None = None) -> str:
    """Strict JSON text; paths become strings."""
    return json.dumps(_plain(value), ensure_ascii=False, allow_nan=False, indent=indent)


def write_json(path: Path, value: Any) -> None:
    """Put a whole file in place in one move: a reader sees the old one or the new one."""
    write_text(path, to_json(value, indent=2) + "\n")


def write_text(path: Path, text: str) -> None:
    """As `write_json`, for any text."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in a file; None when there is no file or it does not hold one."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def read_lines(path: Path, start: int = 0) -> Iterator[tuple[int, dict[str, Any]]]:
    """(byte offset behind the line, object) of every whole line from byte `start` on.

    A last line without its newline is still being written and is left for the next reader; a broken line in
    the middle is the trace of a crash before a resume and is passed over.
    """
    try:
        file = path.open("rb")
    except OSError:
        return
    with file:
        file.seek(start)
        offset = start
        for line in file:
            if not line.endswith(b"\n"):
                return
            offset += len(line)
            try:
                value = json.loads(line)
            except ValueError:
                continue
            if isinstance(value, dict):
                yield offset, value


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return value
