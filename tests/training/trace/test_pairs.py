"""A step on fake tensors and a process group that is not there allocates what two real ranks do, to 1 %.

The real ranks are two processes that talk through gloo; each phase of each rank is compared.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from pairs import DOCUMENTS, PAIRS, Pair, small_buckets

from shardwise.launch import operators, start
from shardwise.training.model import ModelFolder
from shardwise.training.trace.step import trace

PHASES = ("forward", "loss", "backward", "step", "evaluation", "save")
Results = Callable[[Pair], list[dict[str, Any]]]


@pytest.fixture(scope="session")
def results(tmp_path_factory: pytest.TempPathFactory, smollm2: Path) -> Results:
    """What both ranks measured of a pair's phases. All pairs run when the first is asked for."""
    pytest.importorskip("deepspeed")
    root = tmp_path_factory.mktemp("pairs")
    ranks: list[dict[str, Any]] = []

    def of(pair: Pair) -> list[dict[str, Any]]:
        if not ranks:
            ranks.extend(run(root, smollm2))
        found = [rank.get(pair.name, {"error": "a pair before it failed"}) for rank in ranks]
        errors = [one["error"] for one in found if "error" in one]
        if errors:
            pytest.fail("\n".join(errors))
        return [{**one, "folder": smollm2 if pair.real else root / f"model-{pair.tied}"} for one in found]

    return of


def run(root: Path, smollm2: Path) -> list[dict[str, Any]]:
    operators.build(tuple(operators.OPERATORS), "cpu", lambda text: print(text, file=sys.stderr))
    environment = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "SMOLLM2": str(smollm2)}
    command = [sys.executable, str(Path(__file__).with_name("pair_ranks.py")), str(root)]
    outcome = start(command, 2, root / "logs", environment | operators.environment("cpu"))
    reports = [root / f"rank-{r}.json" for r in range(2)]
    if not all(f.exists() for f in reports):
        failure = outcome.failure
        pytest.fail("\n".join((failure.reason, *failure.tail)) if failure else "no report")
    return [json.loads(f.read_text()) for f in reports]


def test_every_engine_of_the_contract_is_compared_with_every_method_it_runs() -> None:
    sys.path.insert(0, str(Path(__file__).parents[1] / "engines"))
    from cases import CASES

    def kind(engine: str, section: Any, method: str) -> tuple[str, int, bool, str]:
        """Tensors on NVMe lie in the buffers of those in host memory."""
        places = (section.get("cpu_offload"), section.get("offload_optimizer"))
        return engine, section.get("zero_stage", 0), any(places), method

    known = {
        kind(c.engine["name"], c.engine.get(c.engine["name"], {}), c.method)
        for cases in CASES.values()
        for c in cases
    }
    assert known - {kind(p.engine, p.section, p.method) for p in PAIRS} == set()


@pytest.mark.parametrize("pair", PAIRS, ids=[p.name for p in PAIRS])
def test_a_trace_allocates_what_each_of_two_ranks_does(pair: Pair, results: Results) -> None:
    """Load is left out: a trace has no files to read."""
    measured = results(pair)
    folder = measured[0]["folder"]
    recipe = pair.recipe(folder)
    for rank, found in enumerate(measured[: 1 + pair.both]):
        batches = [DOCUMENTS] * pair.accumulation
        with small_buckets():
            traced = trace(recipe, ModelFolder(folder, recipe), batches, 2, "cpu", rank=rank).peaks
        for phase in (p for p in PHASES if p in found):
            real, fake = found[phase], traced[phase]
            difference = {
                t: fake.terms.get(t, 0) - real["terms"].get(t, 0) for t in {*fake.terms, *real["terms"]}
            }
            assert fake.bytes == pytest.approx(real["bytes"], rel=0.01), (rank, phase, difference)
