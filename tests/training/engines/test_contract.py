"""The contract every engine keeps, on two processes: the same steps as `single`, whatever is split or moved.

All cases of one engine run in one pair of processes (ranks.py); here their numbers are judged. Covers L03 (uneven
trained tokens), L08 (fp32 masters), L17 (tied embeddings under FSDP2), L18 (the global norm clips), C06 (whole,
true weights in the export) and C07's base (state by parameter name).
"""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from cases import CASES, Case

from shardwise.launch import operators, start

ALL = [case for cases in CASES.values() for case in cases]


@pytest.fixture(scope="session")
def results(tmp_path_factory: pytest.TempPathFactory, smollm2: Path) -> Any:
    """case name -> what ranks.py measured; an engine runs when its first case is asked for."""
    root = tmp_path_factory.mktemp("engines")
    found: dict[str, dict[str, Any]] = {}

    def of(case: Case, part: str = "") -> dict[str, Any]:
        engine, key = case.engine["name"], part or case.name
        if engine not in found:
            found[engine] = run(engine, root, smollm2)
        if key not in found[engine]:
            pytest.fail(f"{key} did not run: a case of {engine} before it failed")
        result: dict[str, Any] = found[engine][key]
        if "error" in result:
            pytest.fail(result["error"])
        return result

    return of


def run(engine: str, root: Path, smollm2: Path) -> dict[str, Any]:
    environment = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "SMOLLM2": str(smollm2)}
    if engine == "deepspeed":
        pytest.importorskip("deepspeed")
        operators.build(tuple(operators.OPERATORS), "cpu", lambda text: print(text, file=sys.stderr))
        environment |= operators.environment("cpu")
    command = [sys.executable, str(Path(__file__).with_name("ranks.py")), engine, str(root)]
    shared = shared_memory()
    outcome = start(command, 2, root / f"logs-{engine}", environment)
    left = shared_memory() - shared
    assert not left, f"{engine} leaves shared memory behind: {sorted(left)}"
    reports = [json.loads(f.read_text()) for f in sorted(root.glob(f"{engine}-*.json"))]
    if not reports:
        failure = outcome.failure
        pytest.fail(
            f"{engine}: {failure.reason if failure else 'no report'}\n"
            + "\n".join(failure.tail if failure else ())
        )
    merged = reports[0]
    for report in reports[1:]:  # another rank reports only when something failed there
        merged |= {
            name: r for name, r in report.items() if "error" in r and "error" not in merged.get(name, {})
        }
    return merged


def shared_memory() -> set[str]:
    """DeepSpeed's blocks on this machine: they outlive their processes and take memory until they are removed."""
    return {f.name for f in Path("/dev/shm").glob("deepspeed_*")}


@pytest.fixture(params=ALL, ids=[c.name for c in ALL])
def case(request: pytest.FixtureRequest) -> Case:
    one: Case = request.param
    return one


def test_steps_follow_single(case: Case, results: Any) -> None:
    """20 steps on uneven shares (L03): loss, clipped norm (L18), final weights; and the weights have moved."""
    found = results(case)
    assert len(found["losses"]) == case.steps and found["clipped"] > case.steps / 2
    assert found["start"] == 0.0 and found["moved"] > 1e-3
    assert found["loss"] <= case.loss, (found["losses"], found["reference_losses"])
    assert found["norm"] <= 10 * case.loss
    assert found["weights"] <= case.weights


def test_a_short_last_window_counts_its_own_tokens(case: Case, results: Any) -> None:
    """Fewer micro-batches than usual before the update (L04): divided by its own tokens, same as single."""
    assert results(case)["short"] <= 10 * case.loss


def test_evaluation_is_the_same(case: Case, results: Any) -> None:
    found = results(case)
    assert found["before"] <= case.loss and found["after"] <= case.loss


def test_save_and_load_continue_exactly(case: Case, results: Any) -> None:
    """A fresh engine with the saved state evaluates and takes the next step like the one that saved it."""
    found = results(case)
    assert found["reloaded"] <= 1e-7 and found["resumed"] <= 1e-6


def test_the_export_is_the_model_in_plain_libraries(case: Case, results: Any) -> None:
    """transformers or PEFT load it and get the engine's loss; bf16 files hold rounded masters (C06, L17)."""
    assert results(case)["export_wrong"] == []
    assert results(case)["exported"] <= (1e-6 if case.precision == "fp32" else 2e-3)


def test_what_was_asked_is_live(case: Case, results: Any) -> None:
    found = results(case)
    assert found["mismatches"] == []
    assert found["facts"]["optimizer_dtype"] == "torch.float32"  # L08
    assert found["facts"]["world_size"] == 2


def test_every_trained_tensor_has_a_gradient(case: Case, results: Any) -> None:
    assert results(case)["without_gradient"] == []


def test_a_lone_rank_can_generate(case: Case, results: Any) -> None:
    tokens = results(case)["generated"]
    assert tokens[:6] == [5, 6, 7, 8, 9, 10] and len(tokens) == 10


def test_generated_text_does_not_depend_on_the_engine(results: Any) -> None:
    same = [
        c
        for c in ALL
        if c.method == "full" and c.precision == "fp32" and not c.tied and not c.optimizer and not c.real
    ]
    assert len({tuple(results(c)["generated"]) for c in same}) == 1


def bytes_of(results: Any, name: str, *terms: str) -> int:
    found = results(next(c for c in ALL if c.name == name))["bytes"]
    return sum(found[t] for t in terms)


def test_held_bytes_fall_as_theory_says(results: Any) -> None:
    """Two ranks: ZeRO-1 halves states and masters, ZeRO-3 and FSDP2 weights too (arXiv 1910.02054)."""
    whole = results(ALL[0])["reference_bytes"]
    states, weights = whole["optimizer"], whole["weights"]
    assert bytes_of(results, "ddp-full", "optimizer") == states
    for name in ("zero1-full", "zero2-full", "zero3-full", "fsdp2-full"):
        assert bytes_of(results, name, "optimizer") == pytest.approx(states / 2, rel=0.01)
    for name in ("zero3-full", "fsdp2-full"):
        assert bytes_of(results, name, "weights") == pytest.approx(weights / 2, rel=0.01)
    for name in ("zero1-full", "zero2-full"):
        assert bytes_of(results, name, "weights") == weights


def test_peak_bytes_fall_as_theory_says(results: Any) -> None:
    """DDP > ZeRO-1 > ZeRO-2 > ZeRO-3 ~ FSDP2 on the device, offload lower still and in the host instead."""
    peaks: dict[str, dict[str, int]] = {}
    for engine in CASES:
        peaks |= results(CASES[engine][0], "memory")
    device = {name: found["device"] for name, found in peaks.items()}
    order = ("ddp", "zero1", "zero2", "zero3", "zero3-offload")
    assert [device[name] for name in order] == sorted((device[name] for name in order), reverse=True), device
    assert device["zero1"] > 1.1 * device["zero2"] > 1.1 * device["zero3"], device
    assert 0.6 < device["fsdp2"] / device["zero3"] < 1.4, device
    for name in ("zero2", "zero3", "fsdp2"):
        assert device[f"{name}-offload"] < 0.7 * device[name], device
        assert peaks[f"{name}-offload"]["host"] > device[name] / 2 and peaks[name]["host"] == 0, peaks
