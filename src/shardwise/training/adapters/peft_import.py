"""PEFT without what a run of full-precision bases does not need."""

import importlib
import sys


def import_peft(quantised: bool) -> None:
    """Import PEFT; for a base that is not quantised without bitsandbytes, which costs most of the import.

    bitsandbytes brings torch's compiler with it: 1.0 of PEFT's 1.2 processor seconds, once torch and transformers
    are there (torch 2.13, PEFT 0.21, bitsandbytes 0.50). PEFT asks once per process whether bitsandbytes is
    installed and remembers the answer, so only a rank, which trains one recipe and ends, may call this.
    bitsandbytes itself can be imported afterwards, as its optimizers are.
    """
    hidden = not quantised and "bitsandbytes" not in sys.modules and "peft" not in sys.modules
    if hidden:
        sys.modules["bitsandbytes"] = None  # type: ignore[assignment]  # to importlib: not there
    try:
        importlib.import_module("peft")
    finally:
        if hidden:
            del sys.modules["bitsandbytes"]
