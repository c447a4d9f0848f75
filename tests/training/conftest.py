"""Small runs, trained in this process."""

from collections.abc import Callable
from pathlib import Path

import pytest

from shardwise.runs import RunFolder


@pytest.fixture(scope="session")
def small_run(
    tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, chat_file: Path
) -> Callable[[str], RunFolder]:
    """A finished run of 6 steps by method and base, made once each."""
    root = tmp_path_factory.mktemp("exports")
    made: dict[str, RunFolder] = {}

    def make(method: str, model: Path = tiny_model) -> RunFolder:
        from shardwise.launch.job import decide
        from shardwise.recipe import dump_recipe, parse_recipe
        from shardwise.runs import create_run
        from shardwise.training.main import main

        key = f"{method}-{model.name}"
        if key not in made:
            text = (
                f"model: {model}\ndata: {{train: {chat_file}, validation: 4, sequence_length: 64}}\n"
                f"method: {method}\nlora: {{rank: 4}}\noptimizer: {{learning_rate: 1e-2}}\n"
                "training: {max_steps: 6, global_batch_size: 4, micro_batch_size: 1, precision: fp32}\n"
                "engine: {name: single, device: cpu, processes: 1}\nevaluation: {every_steps: 3}\n"
                "checkpoint: {every_steps: 3}\n"
            )
            recipe = decide(parse_recipe(text)).recipe
            run = create_run(root, key, dump_recipe(recipe), {})
            assert main([str(run.path)]) == 0
            run.release()
            made[key] = run
        return made[key]

    return make
