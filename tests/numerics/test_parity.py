"""The whole product on one and two ranks: the same run, whatever runs it (L03, L07, R03)."""

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

STEPS = 12  # as in L07: with three micro-batches per rank and step
ENGINES = {
    "single": "{name: single, processes: 1, device: cpu}",
    "ddp": "{name: ddp, processes: 2, device: cpu}",
    "fsdp2": "{name: fsdp2, processes: 2, device: cpu}",
    "deepspeed": "{name: deepspeed, processes: 2, device: cpu, deepspeed: {zero_stage: 3}}",
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Any:
    """engine name -> the run folder of the same recipe, each run once."""
    root = tmp_path_factory.mktemp("parity")
    picked = random.Random(0)
    rows = [
        {
            "messages": [
                {"role": "user", "content": "the fox"},
                {"role": "assistant", "content": "dog " * picked.randint(1, 30)},
            ]
        }
        for _ in range(80)
    ]
    (root / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    done: dict[str, Path] = {}

    def of(engine: str) -> Path:
        if engine not in done:
            if engine == "deepspeed":
                pytest.importorskip("deepspeed")
            recipe = root / f"{engine}.yaml"
            recipe.write_text(
                f"model: {tiny_model}\ndata: {{train: {root / 'rows.jsonl'}, sequence_length: 96, validation: 0.1}}\n"
                "method: full\n"
                "optimizer: {learning_rate: 1e-3}\n"
                "schedule: {name: linear, warmup: 2}\n"
                f"training: {{max_steps: {STEPS}, global_batch_size: 6, micro_batch_size: 1, precision: fp32}}\n"
                f"engine: {ENGINES[engine]}\n"
                f"run: {{folder: {root / 'runs'}, name: {engine}}}\n"
            )
            command = [sys.executable, "-m", "shardwise.cli.main", "train", str(recipe)]
            run = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
            assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-4000:]
            done[engine] = root / "runs" / engine
        return done[engine]

    return of


def steps(folder: Path) -> list[dict[str, Any]]:
    lines = map(json.loads, (folder / "events.jsonl").read_text().splitlines())
    return [line for line in lines if line.get("kind", line.get("event")) == "step"]


@pytest.mark.parametrize("engine", ["ddp", "fsdp2", "deepspeed"])
def test_two_ranks_train_the_model_that_one_trains(engine: str, runs: Any) -> None:
    one, two = steps(runs("single")), steps(runs(engine))
    assert len(one) == len(two) == STEPS
    assert [s["learning_rate"] for s in one] == [s["learning_rate"] for s in two]  # L07
    assert two[-1]["learning_rate"] < 0.2 * max(s["learning_rate"] for s in two)
    assert [s["trained_tokens"] for s in one] == [s["trained_tokens"] for s in two]
    for a, b in zip(one, two, strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-5)
        assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=1e-4)
    assert two[-1]["loss"] < two[0]["loss"] - 0.1
    ours, theirs = (load_file(runs(e) / "model" / "model.safetensors") for e in (engine, "single"))
    assert ours.keys() == theirs.keys()
    for name, weight in theirs.items():
        assert float((ours[name] - weight).norm() / weight.norm()) < 1e-4, name


@pytest.mark.parametrize("engine", ["ddp", "fsdp2", "deepspeed"])
def test_the_held_out_loss_is_the_same(engine: str, runs: Any) -> None:
    one, two = (json.loads((runs(e) / "summary.json").read_text()) for e in ("single", engine))
    for key in ("evaluation_before", "evaluation_after"):
        assert two[key] == pytest.approx(one[key], rel=1e-5)
    assert two["engine"]["world_size"] == 2
