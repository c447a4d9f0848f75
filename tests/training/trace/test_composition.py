"""The planner's formula, put together from parts, allocates what a whole trace does: to 0.1 %.

`benchmarks/composition.py` holds the full set of cases; a few of its kind, cheap to trace, are run here.
SHARDWISE_ALL_COMPOSITIONS=1 runs all of them (about 15 minutes).
"""

import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

import pytest

FILE = Path(__file__).parents[3] / "benchmarks" / "composition.py"


def _load() -> Any:
    spec = importlib.util.spec_from_file_location("composition", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["composition"] = module
    spec.loader.exec_module(module)
    return module


composition = _load()
Case = composition.Case
QUICK = (
    Case("meta-llama/Llama-3.2-1B", 8, sequence=1024, checkpointing="5", accumulation=2),
    Case("Qwen/Qwen3-1.7B", 9, "lora", rows=3, sequence=512),
    Case("mistralai/Mistral-7B-v0.3", 8, "qlora", sequence=1536, settings="lora.rank=48"),
    Case("google/gemma-2-2b", 8, checkpointing="full", sequence=768),
    Case("HuggingFaceTB/SmolLM2-360M", 10, engine="ddp", ranks=4),
    Case("Qwen/Qwen3-30B-A3B", 6, "lora", sequence=1024),
    Case("meta-llama/Llama-3.2-1B", 8, sequence=1024, settings="optimizer.master_weights=false"),
    Case("meta-llama/Llama-3.2-3B", 8, engine="fsdp2", ranks=512, checkpointing="full"),
    Case("Qwen/Qwen2.5-1.5B", 9, "lora", engine="fsdp2", ranks=12, settings="lora.rank=24"),
    Case("mistralai/Mistral-7B-v0.3", 8, "qlora", engine="fsdp2", ranks=6, checkpointing="selective"),
)
CASES = composition.HELD if os.environ.get("SHARDWISE_ALL_COMPOSITIONS") else QUICK


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_parts_put_together_equal_the_whole_trace(case: Any, tmp_path: Path):
    found = composition.compare(case, tmp_path)
    assert found["peak_error"] == pytest.approx(0, abs=0.001), found
    assert max(abs(e) for e in found["phase_errors"].values()) < 0.02, found["phase_errors"]


def test_the_recorded_comparison_holds_sixty_cases():
    cases = {case["case"]: abs(case["peak_error"]) for case in composition.recorded()["cases"]}
    assert sum(error <= 0.001 for error in cases.values()) >= 60
    assert all(cases[case.name] < 0.005 for case in composition.HELD)
