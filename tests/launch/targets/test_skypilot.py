"""SkyPilot task files: what they say, and, where SkyPilot is installed, that it reads them."""

import sys
from pathlib import Path

import pytest
from ruamel.yaml import YAML

sys.path.insert(0, str(Path(__file__).parent))
from made import launched

from shardwise.errors import RecipeError
from shardwise.launch.targets import skypilot

VOLUME = {"volume": "work"}


def test_a_task_asks_for_the_gpus_of_the_plan(tmp_path: Path) -> None:
    run = launched(tmp_path, gpus="8xH100-80GB", skypilot=VOLUME, environment=["HF_TOKEN"])
    task = YAML(typ="safe").load(skypilot.render(run))
    assert task["num_nodes"] == 2 and task["resources"]["accelerators"] == "H100:8"
    assert task["secrets"] == {"HF_TOKEN": None}
    assert list(task["volumes"].values()) == ["work"]
    assert "touch" not in task["run"]


def test_a_run_folder_that_would_be_lost_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="outlives"):
        skypilot.render(launched(tmp_path))
    with pytest.raises(RecipeError, match="bucket"):
        skypilot.render(launched(tmp_path, skypilot={"bucket": "b"}))
    one = YAML(typ="safe").load(skypilot.render(launched(tmp_path, nodes=1, skypilot={"bucket": "b"})))
    assert {"name": "b", "mode": "MOUNT_CACHED"} in one["file_mounts"].values()


def test_sky_reads_the_task_and_catches_a_mistake(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    sky = pytest.importorskip("sky", reason="SkyPilot is not installed")
    run = launched(tmp_path, gpus="8xH100-80GB", skypilot=VOLUME, environment=["HF_TOKEN"])
    run.folder.mkdir(parents=True)
    (run.folder / "recipe.yaml").write_text(run.recipe_text)
    path = tmp_path / "task.yaml"
    path.write_text(skypilot.render(run))
    task = sky.Task.from_yaml(str(path))
    assert task.num_nodes == 2
    path.write_text(skypilot.render(run).replace("num_nodes", "num_node"))
    with pytest.raises(Exception, match="num_node"):
        sky.Task.from_yaml(str(path))
