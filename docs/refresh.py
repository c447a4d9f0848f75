"""Run the planning commands of README.md again and write what they print: `python docs/refresh.py`.

The rules of thumb in docs/memory.md are derived again from the estimator.

A line `...` in a block stands for lines that are left out; as many before and after it are kept as there were.
"""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import thumb

README = Path(__file__).parents[1] / "README.md"
BLOCK = re.compile(r"(^```console\n\$ (shardwise plan [^\n]*)\n)(.*?)(^```)", re.M | re.S)


def printed(command: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-m", "shardwise.cli.main", *shlex.split(command)[1:]],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "COLUMNS": "100", "HF_HUB_OFFLINE": "1"},
    )
    return [line.rstrip() for line in done.stdout.rstrip().splitlines()]


def renewed(match: re.Match[str]) -> str:
    lines, old = printed(match[2]), match[3].rstrip("\n").split("\n")
    if "..." in old:
        cut = old.index("...")
        after = len(old) - cut - 1
        lines = [*lines[:cut], "...", *(lines[-after:] if after else [])]
    return match[1] + "\n".join(lines) + "\n" + match[4]


if __name__ == "__main__":
    README.write_text(BLOCK.sub(renewed, README.read_text()))
    thumb.PAGE.write_text(thumb.renewed(thumb.PAGE.read_text()))
