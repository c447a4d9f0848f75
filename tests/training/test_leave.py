"""The exit code of a rank is what its program says."""

import subprocess
import sys

import pytest

PROGRAM = """
import atexit, sys, threading
from shardwise.training import leave

threading.Thread(target=threading.Event().wait).start()  # an interpreter that ends waits for it, forever
atexit.register(lambda: print("trackers are closed"))

def main(words):
    print("words", words)
    {body}

leave.run(main)
"""


@pytest.mark.parametrize(
    ("body", "code", "told"),
    [
        ("return 75", 75, ""),
        ("sys.exit(3)", 3, ""),
        ("raise ValueError('a bad row')", 1, "ValueError: a bad row"),
        ("raise KeyboardInterrupt", 1, "KeyboardInterrupt"),
    ],
)
def test_what_is_registered_for_the_end_is_done_and_no_thread_is_waited_for(
    body: str, code: int, told: str
) -> None:
    command = [sys.executable, "-c", PROGRAM.format(body=body), "one", "two"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == code
    assert done.stdout == "words ['one', 'two']\ntrackers are closed\n"
    assert told in done.stderr
