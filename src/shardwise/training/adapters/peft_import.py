"""PEFT without what a run of full-precision bases does not need."""

import importlib
import sys
from contextlib import suppress


def import_peft(quantised: bool) -> None:
    """Import PEFT; for a base that is not quantised without bitsandbytes, which costs most of the import.

    bitsandbytes brings torch's compiler with it: 0.8 of PEFT's 0.9 processor seconds, once torch and transformers
    are there (torch 2.13, PEFT 0.21, bitsandbytes 0.50). PEFT asks whether bitsandbytes is installed when the first
    layer gets its adapter, and remembers the answer for the process: it is asked here, while bitsandbytes is hidden.
    So only a rank, which trains one recipe and ends, may call this. bitsandbytes itself can be imported afterwards,
    as its optimizers are.
    """
    hidden = not quantised and "bitsandbytes" not in sys.modules and "peft" not in sys.modules
    if hidden:
        sys.modules["bitsandbytes"] = None  # type: ignore[assignment]  # to importlib: not there
    try:
        importlib.import_module("peft")
        if hidden:
            _answer("is_bnb_available", "is_bnb_4bit_available")
    finally:
        if hidden:
            del sys.modules["bitsandbytes"]


def _answer(*questions: str) -> None:
    """Have PEFT answer, and remember, what it asks about this installation; what it does not ask is left out."""
    with suppress(ImportError):
        asked = importlib.import_module("peft.import_utils")
        for name in questions:
            getattr(asked, name, bool)()
