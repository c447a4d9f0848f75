"""Losses of 20 steps, written down: a change of the mathematics shows as a difference from this file.

Regenerate on purpose only: `python tests/numerics/test_golden_losses.py`, and explain every changed line.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.training.build import build_engine
from shardwise.training.engines.protocol import Ranks
from shardwise.training.model import ModelFolder

sys.path.insert(0, str(Path(__file__).parents[1] / "training" / "engines"))
import toy

GOLDEN = Path(__file__).with_name("golden_losses.json")
CASES: dict[str, dict[str, Any]] = {
    "full-fp32": {"method": "full"},
    "full-fp32-tied": {"method": "full"},
    "full-bf16": {"method": "full", "training": {"precision": "bf16"}},
    "lora-fp32": {"method": "lora", "lora": {"rank": 4, "alpha": 8.0}},
    "dora-fp32": {"method": "lora", "lora": {"rank": 4, "alpha": 8.0, "dora": True}},
    "qlora-fp32": {"method": "qlora", "lora": {"rank": 4, "alpha": 8.0}},
    "full-sgd": {"method": "full", "optimizer": {"name": "sgd"}},
    "full-adafactor": {"method": "full", "optimizer": {"name": "adafactor"}},
    "full-muon": {"method": "full", "optimizer": {"name": "muon"}},
    "full-adamw-8bit": {"method": "full", "optimizer": {"name": "adamw_8bit"}},
}
# bf16 products differ between processors, and so do rounded codes of 8 and 4 bits
LOOSE = {"full-bf16": 5e-3, "full-adamw-8bit": 1e-3, "qlora-fp32": 1e-4}


def losses(name: str, folder: Path) -> list[float]:
    sections = {**CASES[name], "engine": {"name": "single", "device": "cpu", "processes": 1}}
    recipe = toy.recipe(**sections)
    model = toy.make_model(folder / name, tied=name.endswith("tied"))
    engine = build_engine(recipe, ModelFolder(model, recipe), torch.device("cpu"), Ranks(), 4)
    return toy.train(engine, range(20), 1e-3, 0.5).losses


@pytest.mark.parametrize("name", CASES)
def test_losses_are_those_written_down(name: str, tmp_path: Path) -> None:
    expected = json.loads(GOLDEN.read_text())[name]
    assert losses(name, tmp_path) == pytest.approx(expected, rel=LOOSE.get(name, 1e-5))
    assert expected[-1] != pytest.approx(expected[0], rel=1e-3)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        table = {name: [round(x, 7) for x in losses(name, Path(folder))] for name in CASES}
    lines = (f'  "{name}": {json.dumps(values)}' for name, values in table.items())
    GOLDEN.write_text("{\n" + ",\n".join(lines) + "\n}\n")
