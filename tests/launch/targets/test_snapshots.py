"""Every generated file as a person will read it. A change shows as a diff, and its author explains each line.

Write them anew with: SHARDWISE_WRITE_GOLDEN=1 pytest tests/launch/targets/test_snapshots.py
"""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from made import launched

from shardwise.launch.targets import kubernetes, ray, skypilot, slurm, torchrun

SNAPSHOTS = Path(__file__).with_name("snapshots")
GPUS = {"gpus": "8xH100-80GB", "fabric": "infiniband", "interface": "ib0", "environment": ["HF_TOKEN"]}
SETUP = {"setup": ["module load cuda"]}
PYXIS = {
    "partition": "gpu", "options": ["--cpus-per-gpu=12", "--exclusive"], "time_limit": "12:00:00",
    "container": "nvcr.io#nvidia/pytorch:26.10-py3",
}  # fmt: skip
CLAIM = {
    "claim": "work",
    "secret": "tokens",
    "limits": {"rdma/ib": "8"},
    "node_selector": {"pool": "h100"},
    "tolerate": ["nvidia.com/gpu"],
    "labels": {"kueue.x-k8s.io/queue-name": "team-a"},
}
# file -> what makes it, of which target, with which launch section
FILES = {
    "job.sbatch": (slurm.render, {**GPUS, **SETUP, "slurm": {"partition": "gpu", "time_limit": "12:00:00"}}),
    "job-pyxis.sbatch": (slurm.render, {**GPUS, "cache": "/scratch/cache", "slurm": PYXIS}),
    "job-apptainer.sbatch": (
        slurm.render, {**GPUS, "slurm": {"container": "/images/train.sif", "container_runtime": "apptainer"}},
    ),
    "node.sh": (torchrun.render, {**GPUS, **SETUP, "preflight": True}),
    "driver.py": (ray.render, GPUS),
    # and with no options of their own, on processors
    "plain.sbatch": (slurm.render, {"nodes": 1}),
    "plain-node.sh": (torchrun.render, {"nodes": 1}),
    "plain-driver.py": (ray.render, {"preflight": True}),
    "plain-jobset.yaml": (kubernetes.render, {"kubernetes": {"kind": "jobset", "claim": "work"}}),
    "plain-task.yaml": (skypilot.render, {"nodes": 1, "skypilot": {"bucket": "b", "use_spot": False}}),
    "trainjob.yaml": (kubernetes.render, {**GPUS, "kubernetes": CLAIM}),
    "jobset.yaml": (kubernetes.render, {**GPUS, "kubernetes": {"kind": "jobset", **CLAIM}}),
    "task.yaml": (skypilot.render, {**GPUS, **SETUP, "skypilot": {"volume": "work"}}),
}  # fmt: skip


def rendered(name: str, folder: Path) -> str:
    make, section = FILES[name]
    run = launched(folder, **section)  # type: ignore[arg-type]
    return plain(make(run), folder)


def plain(text: str, folder: Path) -> str:
    """Without what differs from machine to machine."""
    return text.replace(str(folder), "/project").replace(sys.executable, "/venv/bin/python")


def compare(name: str, text: str) -> None:
    path = SNAPSHOTS / name
    if os.environ.get("SHARDWISE_WRITE_GOLDEN"):
        path.write_text(text)
    assert text == path.read_text()


@pytest.mark.parametrize("name", FILES)
def test_generated_file(name: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = rendered(name, tmp_path)
    compare(name, text)
    if name.endswith(".py"):
        ast.parse(text)
    if name.endswith((".sh", ".sbatch")):
        assert subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0


def test_generated_job_array(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    runs = [launched(tmp_path, name=name, **GPUS, slurm={"at_once": 1}) for name in ("low", "high")]
    folder = runs[0].folder.parent / "sweep"
    compare("array.sbatch", plain(slurm.render_array("sweep", runs, folder), tmp_path))
    compare("array-task.sbatch", plain(slurm.render(runs[0], "sweep"), tmp_path))


def test_recipes_that_ask_for_other_resources_are_no_array(tmp_path: Path) -> None:
    runs = [launched(tmp_path, name="a"), launched(tmp_path, name="b", nodes=3)]
    with pytest.raises(Exception, match="'a' and 'b' cannot be tasks") as refused:
        slurm.render_array("sweep", runs, tmp_path)
    assert "--nodes=2" in refused.value.why and "--nodes=3" in refused.value.why  # type: ignore[attr-defined]
