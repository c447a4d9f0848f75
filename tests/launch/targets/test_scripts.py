"""The shell scripts and the Ray driver: every value is one word, and secrets are names."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from made import launched

from shardwise.errors import RecipeError
from shardwise.launch import submission
from shardwise.launch.environment import variables
from shardwise.launch.targets import ray, slurm, torchrun

EVIL = "$(touch x)`touch y`; touch z '\" & *"
STUBS = ("srun", "scontrol", "scancel", "hostname")


def run_script(script: str, folder: Path, *arguments: str, **environment: str) -> tuple[list[str], int]:
    """Run a script with Slurm's commands and Python replaced by stubs that write down their words."""
    stubs = folder / "stubs"
    stubs.mkdir()
    for name in (*STUBS, "python-stub"):
        (stubs / name).write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" >> "{folder}/words-{name}"\n')
        (stubs / name).chmod(0o755)
    done = subprocess.run(
        ["bash", "-c", script, "script", *arguments], cwd=folder, capture_output=True, text=True, timeout=30,
        env={"PATH": f"{stubs}:{os.environ['PATH']}", **environment}, check=False,
    )  # fmt: skip
    words = [path for path in folder.glob("words-*") if path.name in ("words-srun", "words-python-stub")]
    return (words[0].read_text().splitlines() if words else []), done.returncode


def test_slurm_script_runs_nothing_that_a_name_says(tmp_path: Path, monkeypatch) -> None:
    evil = tmp_path / EVIL.replace("/", "").replace('"', "")
    evil.mkdir()
    monkeypatch.chdir(evil)
    run = launched(tmp_path, name="$(touch x)", run_folder="$(touch y)", interface="`touch z`")
    words, _ = run_script(
        slurm.render(run), tmp_path, SLURM_JOB_ID="7", SLURM_JOB_NODELIST="n[1-2]", MASTER_ADDR="head"
    )
    assert not [name for name in "xyz" if (evil / name).exists() or (tmp_path / name).exists()]
    assert words[words.index("--name") + 1] == "$(touch x)"
    assert words[-1] == "$(touch y)/$(touch x)"
    assert "--rdzv-endpoint=head:20007" in words and "--rdzv-id=7-0" in words


@pytest.mark.parametrize("runtime", ["pyxis", "apptainer"])
def test_a_container_gets_its_image_and_folders_as_single_words(
    runtime: str, tmp_path: Path, monkeypatch
) -> None:
    evil = tmp_path / "$(touch x) y"
    evil.mkdir()
    monkeypatch.chdir(evil)
    image = "$(touch z) image"
    section = {"container": image, "container_runtime": runtime}
    run = launched(tmp_path, gpus="8xH100-80GB", run_folder=str(evil / "runs"), cache="/c c", slurm=section)
    words, _ = run_script(
        slurm.render(run), tmp_path, SLURM_JOB_ID="7", SLURM_JOB_NODELIST="n[1-2]", MASTER_ADDR="head"
    )
    assert not [name for name in "xz" if (evil / name).exists() or (tmp_path / name).exists()]
    if runtime == "pyxis":
        assert f"--container-image={image}" in words and f"--container-workdir={evil}" in words
        assert f"--container-mounts=/c c:/c c,{evil}:{evil}" in words
    else:
        first = words.index("apptainer")
        assert words[first : first + 5] == ["apptainer", "exec", "--nv", "--pwd", str(evil)]
        assert words[first + 5 : first + 10] == ["--bind", "/c c", "--bind", str(evil), image]
    assert words[words.index("shardwise.launch.wrapper") - 2 :][:2] == ["python", "-m"]


def test_torchrun_lines_run_nothing_that_a_name_says(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = launched(tmp_path, name="$(touch x)", python="python-stub", interface="`touch y`")
    words, code = run_script(torchrun.render(run), tmp_path, "1", HEAD="head")
    assert code == 0
    assert not [name for name in "xy" if (tmp_path / name).exists()]
    assert words[words.index("--name") + 1] == "$(touch x)" and words[words.index("--node-rank") + 1] == "1"
    assert any(word.startswith("--rdzv-conf=is_host=0,") for word in words)


def test_ray_driver_is_python_whose_values_are_literals(tmp_path: Path) -> None:
    run = launched(tmp_path, name='"""\nimport os'.replace("\n", " "), interface="'); import os; ('")
    tree = ast.parse(ray.render(run))
    names = [node for node in ast.walk(tree) if isinstance(node, ast.Assign)]
    assert ast.literal_eval(names[0].value) == run.name
    assert len([n for n in tree.body if isinstance(n, ast.Import)]) == 3  # os, sys, ray and no more


@pytest.mark.parametrize("module", [slurm, torchrun, ray])
def test_a_line_break_in_a_value_is_refused(module, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="control character"):
        module.render(launched(tmp_path, name="a\n#SBATCH --uid=0"))


def test_an_sbatch_line_cannot_be_ended_by_its_value(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="double quote"):
        slurm.render(launched(tmp_path, slurm={"partition": 'a" --uid=0'}))
    assert '#SBATCH --partition="a b"' in slurm.render(launched(tmp_path, slurm={"partition": "a b"}))


@pytest.mark.parametrize(
    "option", ["--nodes=4", "-p gpu", "--wrap=touch x", "mem=0", "--Mem=0", "--mem=0\n#x"]
)
def test_an_option_of_sbatch_that_is_no_addition_is_refused(option: str, tmp_path: Path) -> None:
    assert "#SBATCH --mem=0 " in slurm.render(launched(tmp_path, slurm={"options": ["--mem=0"]}))
    with pytest.raises(RecipeError, match=r"launch.slurm.options|control character"):
        slurm.render(launched(tmp_path, slurm={"options": [option]}))


def test_g04_a_secret_is_named_and_never_written(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_verysecret")
    run = launched(tmp_path, environment=["HF_TOKEN"])
    for module in (slurm, torchrun, ray):
        text = module.render(run)
        assert "HF_TOKEN" in text and "hf_verysecret" not in text
    assert "hf_verysecret" not in run.recipe_text


def test_g04_a_value_beside_a_name_is_refused_without_repeating_it(tmp_path: Path, shardwise) -> None:
    (tmp_path / "r.yaml").write_text("model: m\ndata: d\nlaunch: {environment: ['HF_TOKEN=hf_verysecret']}\n")
    done = shardwise("launch", "r.yaml", "--on", "slurm", "--dry-run", cwd=tmp_path)
    assert done.returncode == 2
    assert "launch.environment" in done.stderr and "verysecret" not in done.stdout + done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["r.yaml"]


def test_a_refused_submission_leaves_nothing(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(Exception, match="sbatch"):
        submission.submit(launched(tmp_path), "slurm", {})
    assert not (tmp_path / "runs" / "launches" / "demo").exists()


def test_network_variables_are_set_only_where_needed_and_say_where_from(tmp_path: Path) -> None:
    def found(**launch) -> dict[str, str]:
        made = variables(launched(tmp_path, **launch).recipe)
        assert all(v.reason and v.source for v in made)
        return {v.name: v.value for v in made if not v.name.startswith("TORCH_")}

    gpus = {"gpus": "8xH100-80GB"}
    assert found() == found(**gpus) == found(**gpus, nodes=1, fabric="infiniband") == {}
    assert found(**gpus, fabric="infiniband") == found(**gpus, fabric="roce") == {"NCCL_NET": "IB"}
    assert found(**gpus, fabric="efa") == {"NCCL_NET": "AWS Libfabric"}
    assert found(**gpus, fabric="ethernet") == {"NCCL_NET": "Socket"}
    assert found(interface="eth0") == {"GLOO_SOCKET_IFNAME": "eth0"}
    assert found(**gpus, interface="eth0")["NCCL_SOCKET_IFNAME"] == "=eth0"
    assert found(cache="/scratch/c") == {
        "HF_HOME": "/scratch/c/huggingface", "SHARDWISE_CACHE": "/scratch/c/shardwise",
    }  # fmt: skip
