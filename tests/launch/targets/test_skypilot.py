"""SkyPilot task files: what they say, and, where SkyPilot is installed, that it reads them."""

import json
import os
import subprocess
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


SKY = Path(__file__).parents[3] / ".venv-sky" / "bin" / "python"
READ = """
import json, sys, sky
for path in sys.argv[1:]:
    try:
        task = sky.Task.from_yaml(path)
    except Exception as problem:
        print(json.dumps({"refused": f"{problem}"}))
        continue
    (machine,) = task.resources
    print(json.dumps({
        "name": task.name, "nodes": task.num_nodes, "gpus": machine.accelerators, "spot": machine.use_spot,
        "recovery": machine.job_recovery, "volumes": task.volumes,
        "secrets": [one.name for one in task.managed_secret_refs],
        "buckets": [store.name for store in task.storage_mounts.values()], "files": sorted(task.file_mounts or {}),
    }))
"""


def read_by_sky(*paths: Path, home: Path) -> "subprocess.CompletedProcess[str]":
    """SkyPilot in an environment of its own: it pins click and others below ours."""
    environment = {**os.environ, "HOME": str(home), "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"}
    return subprocess.run(
        [SKY, "-c", READ, *paths], env=environment, text=True, capture_output=True, timeout=120, check=False
    )


@pytest.mark.skipif(
    not SKY.exists(), reason=f"SkyPilot is not installed in {SKY.parents[1]}: .ci/run does it"
)
def test_sky_itself_reads_the_tasks_and_catches_a_mistake(tmp_path: Path) -> None:
    gpus = launched(
        tmp_path, gpus="8xH100-80GB", skypilot=VOLUME, environment=["HF_TOKEN"], fabric="efa", preflight=True,
        cache="/tmp/cache", setup=["nvidia-smi"],
    )  # fmt: skip
    bucket = launched(
        tmp_path, nodes=1, skypilot={"bucket": "b", "infra": "aws/us-east-1", "use_spot": False}
    )
    paths = []
    for number, run in enumerate((gpus, bucket)):
        run.folder.mkdir(parents=True, exist_ok=True)
        (run.folder / "recipe.yaml").write_text(run.recipe_text)
        paths.append(tmp_path / f"{number}.yaml")
        paths[-1].write_text(skypilot.render(run))
    good = skypilot.render(gpus)
    mistakes = {  # what is written instead -> what SkyPilot says
        good.replace("num_nodes", "num_node"): "did you mean 'num_nodes'",
        good.replace("use_spot: true", "spot: true"): "spot",
        good.replace("use_spot: true", "use_spot: 7"): "7 is not of type 'boolean'",
        good.replace("[75]", "[750]"): "750",
        good.replace("num_nodes: 2", "num_nodes: two"): "two",
    }
    for number, text in enumerate(mistakes):
        paths.append(tmp_path / f"wrong-{number}.yaml")
        paths[-1].write_text(text)
    done = read_by_sky(*paths, home=tmp_path)
    first, second, *refused = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    recovery = {"max_restarts_on_errors": 3, "recover_on_exit_codes": [75]}
    assert {key: first["recovery"][key] for key in recovery} == recovery
    assert (first["name"], first["nodes"], first["gpus"], first["spot"]) == ("demo", 2, {"H100": 8}, True)
    assert first["secrets"] == ["HF_TOKEN"] and list(first["volumes"].values()) == ["work"]
    assert first["files"] == ["/shardwise/recipe.yaml"] and not first["buckets"]
    assert (second["nodes"], second["gpus"], second["spot"], second["buckets"]) == (1, None, False, ["b"])
    assert len(refused) == len(mistakes), done.stderr
    for found, word in zip(refused, mistakes.values(), strict=True):
        assert word in found.get("refused", "taken"), (word, found)
