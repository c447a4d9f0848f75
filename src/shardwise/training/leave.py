"""The end of a process of ranks: its exit code is what the program says, whatever libraries' threads do."""

import atexit
import os
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn


def run(main: Callable[[list[str]], int]) -> NoReturn:
    """Run `main` on the command's words and end the process with what it returns; 1 for what it lets through.

    What was registered for the end is done, but the interpreter is not taken apart: a library's thread in C++ that
    comes back to a half-ended interpreter aborts the process, after all of its work was done.
    """
    try:
        code = main(sys.argv[1:])
    except SystemExit as asked:
        code = asked.code if isinstance(asked.code, int) else 1
    except BaseException:
        traceback.print_exc()
        code = 1
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # a full disk, a closed pipe: the exit code still tells
            stream.flush()
    os._exit(code)
