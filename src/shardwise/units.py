"""Quantities: parsing and printing. Base units inside the program, prefixes only here.

GiB = 2^30 bytes for memory; GB = 10^9 only for links and vendors' names.
"""

import re

from shardwise.errors import UsageError

KIB, MIB, GIB, TIB = 2**10, 2**20, 2**30, 2**40
GB = 10**9

_SECONDS = {"s": 1.0, "sec": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}
_COUNT = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12}
_NUMBER = re.compile(r"^\s*([0-9][0-9_,]*\.?[0-9]*(?:[eE][-+]?[0-9]+)?)\s*([A-Za-z]*)\s*$")


def _parse(text: str, table: dict[str, float] | dict[str, int], kind: str, example: str) -> float:
    match = _NUMBER.match(text)
    if not match or match[2].casefold() not in table:
        raise UsageError(
            f"'{text}' is not a {kind}",
            f"expected a number and one of: {', '.join(u for u in table if u)}",
            f"write it like {example}",
        )
    return float(match[1].replace("_", "").replace(",", "")) * table[match[2].casefold()]


def parse_seconds(text: str) -> float:
    """'12h', '90min' -> seconds. Raises UsageError."""
    return _parse(text, _SECONDS, "duration", "12h, 90min or 3d")


def parse_count(text: str) -> int:
    """'2.5B', '300M', '1_000' -> a count. Raises UsageError."""
    return int(_parse(text, _COUNT, "count", "2.5B, 300M or 100000"))


def parse_usd(text: str) -> float:
    """'500usd', '$500', '500' -> US dollars. Raises UsageError."""
    return _parse(text.strip().removeprefix("$"), {"": 1, "usd": 1}, "amount of money", "500usd")


def format_bytes(count: float) -> str:
    """Memory in binary prefixes: 1.50 GiB, 320 MiB."""
    for size, name in ((TIB, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if abs(count) >= size:
            value = count / size
            return f"{value:.0f} {name}" if value >= 100 else f"{value:.2f} {name}"
    return f"{count:.0f} B"


def format_gb(count: float) -> str:
    """Decimal gigabytes, the unit of rules of thumb and vendors' names."""
    return f"{count / GB:.0f} GB" if count >= 10 * GB else f"{count / GB:.1f} GB"


def format_seconds(seconds: float) -> str:
    """7.3 s, 4 min 10 s, 5 h 02 min, 3 d 4 h."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    if seconds < 3600:
        return f"{int(seconds // 60)} min {int(seconds % 60):02d} s"
    if seconds < 86400:
        return f"{int(seconds // 3600)} h {int(seconds % 3600 // 60):02d} min"
    return f"{int(seconds // 86400)} d {int(seconds % 86400 // 3600)} h"


def format_count(count: float) -> str:
    """8.03 B, 134.5 M, 12,000."""
    for size, name in ((10**12, "T"), (10**9, "B"), (10**6, "M")):
        if abs(count) >= size:
            return f"{count / size:.2f} {name}"
    return f"{count:,.0f}"


def format_usd(usd: float) -> str:
    """$0.42, $12.30, $4,500."""
    return f"${usd:,.2f}" if usd < 100 else f"${usd:,.0f}"
