"""What a rank imports before its first step: seconds that every run waits for."""

import subprocess
import sys

import pytest

RANK = """
import sys
import shardwise.training.main
early = [m for m in ("peft", "bitsandbytes", "deepspeed", "datasets") if m in sys.modules]
assert not early, early
from shardwise.training.adapters.peft_import import import_peft
import_peft(quantised={quantised})
import peft, peft.tuners.lora
print("bitsandbytes" in sys.modules)
import bitsandbytes
"""


@pytest.mark.parametrize("quantised", [False, True])
def test_a_rank_imports_bitsandbytes_only_for_quantised_bases(quantised: bool) -> None:
    code = RANK.format(quantised=quantised)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split()[-1] == str(quantised)
