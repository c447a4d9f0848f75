"""A launched run for the generators, without model or data."""

from pathlib import Path
from typing import Any

from shardwise.launch import submission
from shardwise.launch.targets.parts import Launched
from shardwise.recipe import parse_recipe


def launched(tmp_path: Path, name: str = "demo", run_folder: str = "", **launch: Any) -> Launched:
    """Two nodes, on processors unless `gpus` says otherwise; `run_folder` may hold any characters."""
    recipe = parse_recipe("model: org/model\ndata: rows.jsonl\nmethod: full\n")
    section = recipe.launch.model_validate({"nodes": 2, **launch})
    recipe = recipe.model_copy(
        update={
            "launch": section,
            "run": recipe.run.model_copy(update={"folder": run_folder or str(tmp_path / "runs")}),
        }
    )
    return submission.prepare(recipe, name, None)
