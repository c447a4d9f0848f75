"""What a rank does before it meets the others."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shardwise.launch.job import decide
from shardwise.recipe import dump_recipe, parse_recipe
from shardwise.runs import create_run
from shardwise.training import main as rank
from shardwise.training.engines.protocol import Ranks
from shardwise.training.loop import Stop


class Met(Exception):
    pass


def test_r01_rows_are_ready_before_a_rank_waits_for_the_others(
    tmp_path: Path, tiny_model: Path, chat_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long preparation takes, no collective with a time limit is waiting meanwhile."""
    recipe = parse_recipe(
        f"model: {tiny_model}\ndata: {{train: {chat_file}, validation: 4, sequence_length: 64}}\n"
        "training: {max_steps: 2, global_batch_size: 4, micro_batch_size: 1, precision: fp32}\n"
        "engine: {name: ddp, device: cpu, processes: 2}\n"
    )
    run = create_run(tmp_path, "run", dump_recipe(decide(recipe).recipe), {})
    order: list[str] = []
    real = rank.prepared_rows

    def rows(*arguments: Any) -> Any:
        found = real(*arguments)
        order.append("rows")
        return found

    def meet(*_: Any, **__: Any) -> None:
        order.append("group")
        raise Met

    monkeypatch.setattr(rank, "prepared_rows", rows)
    monkeypatch.setattr(rank.dist, "init_process_group", meet)
    with pytest.raises(Met):
        rank.rank_main(run, Ranks(1, 2, 1), Stop(), resume=False)
    run.release()
    assert order == ["rows", "group"]


def test_adapters_on_a_plain_base_do_not_bring_in_bitsandbytes(tiny_model: Path) -> None:
    """It costs more than all the rest of PEFT; PEFT looks for it when the first layer gets its adapter."""
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from shardwise.recipe import parse_recipe\n"
        "from shardwise.training.adapters.peft_import import import_peft\n"
        "from shardwise.training.model import ModelFolder\n"
        "import_peft(quantised=False)\n"
        "from shardwise.training.adapters.lora import adapt\n"
        f"recipe = parse_recipe('model: {tiny_model}\\ndata: x\\ntraining: {{precision: fp32}}\\n')\n"
        "adapt(ModelFolder(Path(recipe.model.source), recipe).load(), recipe.lora, 0)\n"
        "assert 'bitsandbytes' not in sys.modules, 'imported'\n"
        "from importlib.util import find_spec\n"
        "find_spec('bitsandbytes')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
