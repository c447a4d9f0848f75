"""The process of one rank, started by shardwise.launch: `python -m shardwise.training RUN_FOLDER [--resume]`.

With `--wait` instead, what to do is read from standard input when all is imported.
"""

import gc
import json
import os
import sys

from shardwise.training import leave


def main(arguments: list[str]) -> int:
    """Import what a rank needs and be one; returns its exit code (see `shardwise.training.main`)."""
    # What imports make stays for good, a million objects; to look through them again and again while they are made
    # is a fifth of the time to the first step.
    gc.disable()
    from shardwise.training.main import main as rank

    gc.freeze()
    gc.enable()
    return rank(_told() if arguments == ["--wait"] else arguments)


def _told() -> list[str]:
    """The arguments that the launcher has decided on, in its environment; ends the process if there is no run."""
    line = sys.stdin.readline()
    if not line:
        sys.exit(0)
    told = json.loads(line)
    os.environ.update(told["environment"])
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    arguments: list[str] = told["arguments"]
    return arguments


if __name__ == "__main__":
    leave.run(main)
