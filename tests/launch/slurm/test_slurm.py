"""`launch --on slurm` on a real Slurm of two nodes, started for these tests and ended after them.

Installs nothing; where Debian's packages are not there, these tests are skipped and say so.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))
from cluster import Cluster, cluster, missing
from uninterrupted import STEPS, losses, recipe

from shardwise.recipe import parse_recipe
from shardwise.runs import RunFolder

pytestmark = pytest.mark.skipif(bool(missing()), reason=f"no Slurm here: {missing()}")

# Node names do not resolve on one machine; on a cluster none of these is needed.
ONE_MACHINE = {"MASTER_ADDR": "127.0.0.1", "PET_LOCAL_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
ZERO_3 = (
    "--set",
    "engine.name=deepspeed",
    "--set",
    "engine.deepspeed.zero_stage=3",
    "--set",
    "training.max_steps=4",
)


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    with cluster(tmp_path_factory.mktemp("slurm")) as found:
        yield found


@pytest.fixture(scope="module")
def place(tmp_path_factory, tiny_model: Path, chat_file: Path) -> Path:
    folder = tmp_path_factory.mktemp("two nodes")  # a blank in every path
    launch = "{nodes: 2, interface: lo, environment: [MASTER_ADDR]}"
    (folder / "r.yaml").write_text(recipe(tiny_model, chat_file, 0, launch))
    return folder


def shardwise(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "shardwise.cli.main", *arguments]


def command(*arguments: str) -> list[str]:
    return shardwise("launch", "r.yaml", "--on", "slurm", *arguments)


def job_folder(place: Path, run: RunFolder) -> Path:
    return place / "runs" / "launches" / run.name


def environment(slurm: Cluster) -> dict[str, str]:
    return {**os.environ, **slurm.environment, **ONE_MACHINE}


def wait_for_step(run: RunFolder, step: int, process: "subprocess.Popen[str]") -> None:
    wait_for(lambda: any(s.step >= step for s in run.steps()), process)


def wait_for(happened: Callable[[], bool], process: "subprocess.Popen[str]") -> None:
    deadline = time.monotonic() + 180
    while not happened():
        assert process.poll() is None and time.monotonic() < deadline, "the run did not get that far"
        time.sleep(0.1)


def test_a_preempted_run_is_requeued_and_ends_with_the_same_losses(
    slurm: Cluster, place: Path, whole_losses: list[tuple[int, float]]
) -> None:
    run = RunFolder(place / "runs" / "pre")
    following = subprocess.Popen(
        command("--name", "pre"), cwd=place, env=environment(slurm), text=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        wait_for_step(run, 2, following)
        slurm.run(
            "sbatch", "--partition=high", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=sleep 2"
        )
        _, said = following.communicate(timeout=500)
    finally:
        following.kill()
    assert following.returncode == 0, said
    resumed = [e.model_dump()["step"] for e in run.events("resume")]
    assert len(resumed) == 1 and 0 < resumed[0] < STEPS, said
    assert "pending" in said.split("running", 1)[1], "it was never back in the queue"
    (log,) = (place / "runs" / "launches" / "pre").glob("slurm-*.out")
    assert "back into the queue" in log.read_text() and "Traceback" not in log.read_text()
    assert run.state == "done" and [step for step, _ in losses(run)] == list(range(1, STEPS + 1))

    assert losses(run) == whole_losses
    kept = parse_recipe(run.recipe_text())  # two ranks in all: one on each of two nodes, as in every file
    assert (kept.engine.processes, kept.launch.nodes) == (1, 2)


def test_zero_3_runs_over_two_nodes_as_fsdp2_does(slurm: Cluster, place: Path) -> None:
    pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")
    cache = place / "cache"
    done = subprocess.run(
        command("--name", "zero3", "--preflight", "--set", f"launch.cache={cache}", *ZERO_3),
        cwd=place, env=environment(slurm), text=True, capture_output=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    run = RunFolder(place / "runs" / "zero3")
    start_event = next(e.model_dump() for e in run.events("start"))
    assert start_event["world_size"] == 2 and [step for step, _ in losses(run)] == [1, 2, 3, 4]
    first = [loss for _, loss in losses(RunFolder(place / "runs" / "pre"))][:1]
    assert losses(run)[0][1] == pytest.approx(first[0], abs=1e-4)
    assert json.loads((run.path / "summary.json").read_text())["estimate"]["peak_allocated_bytes"] > 0
    (log,) = (place / "runs" / "launches" / "zero3").glob("slurm-*.out")
    assert "preflight: 2 ranks on 2 nodes, all answer" in log.read_text()
    assert log.read_text().count("preparing rows") == 2 and any((cache / "shardwise").rglob("*.*"))
    assert len(json.loads((run.logs_path / "links.json").read_text())["sent"]) == 2


def test_tasks_of_an_array_are_requeued_and_cancelled_one_by_one(slurm: Cluster, place: Path) -> None:
    """Two recipes as one array. One ends; the other is out of time, requeued, resumed, and then cancelled."""
    steps = {"short": 3, "long": 20_000}
    for name, count in steps.items():
        text = (place / "r.yaml").read_text().replace("nodes: 2", "nodes: 1").replace("fsdp2", "single")
        (place / f"{name}.yaml").write_text(text.replace(f"max_steps: {STEPS}", f"max_steps: {count}"))
    short, long = (RunFolder(place / "runs" / f"both-{name}") for name in steps)
    following = subprocess.Popen(
        shardwise("launch", "short.yaml", "long.yaml", "--on", "slurm", "--name", "both"), cwd=place, text=True,
        env=environment(slurm), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        wait_for_step(long, 2, following)
        ids = [
            json.loads((job_folder(place, run) / "job.json").read_text())["job_id"] for run in (short, long)
        ]
        assert [one.split("_")[1] for one in ids] == ["0", "1"] and ids[0].split("_")[0] == ids[1].split("_")[
            0
        ]
        slurm.run("scancel", "--batch", "--signal=USR1", ids[1])  # as Slurm does before the time limit
        wait_for(lambda: any(long.events("resume")), following)
        resumed = next(e.model_dump()["step"] for e in long.events("resume"))
        wait_for_step(long, resumed + 2, following)
        asked = subprocess.run(
            shardwise("cancel", "both-long"), cwd=place, env=environment(slurm), check=False, timeout=60
        )
        assert asked.returncode == 0
        _, said = following.communicate(timeout=120)
    finally:
        following.kill()
    assert following.returncode == 75 and "both-short is done" in said and "both-long is stopped" in said, (
        said
    )
    assert short.state == "done" and len(losses(short)) == 3
    assert long.state == "interrupted" and resumed >= 2
    status = subprocess.run(
        shardwise("status", "both-long", "--json"), cwd=place, env=environment(slurm), text=True,
        capture_output=True, timeout=60, check=True,
    )  # fmt: skip
    row = json.loads(status.stdout)
    assert (row["scheduler"], row["run_state"]) == ("ended", "interrupted") and row["step"] > resumed
    (log,) = job_folder(place, long).glob("slurm-*.out")
    assert log.read_text().count("back into the queue") == 1, "it was not queued again after the cancel"


def test_the_doctor_takes_its_place_from_srun(slurm: Cluster, place: Path) -> None:
    said = subprocess.run(
        ["srun", "--nodes=2", "--ntasks-per-node=1", *shardwise("doctor", "--nodes", "--interface", "lo")],
        cwd=place, env=environment(slurm), text=True, capture_output=True, timeout=120, check=False,
    )  # fmt: skip
    assert said.returncode == 0, said.stderr
    assert "preflight: 2 ranks on 2 nodes, all answer" in said.stdout


def test_a_recipe_that_its_node_refuses_ends_with_2_and_is_not_queued_again(
    slurm: Cluster, place: Path
) -> None:
    done = subprocess.run(
        command("--name", "refused", "--set", "data.train=missing.jsonl", "--set", "launch.nodes=1"),
        cwd=place, env=environment(slurm), text=True, capture_output=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert "refused is refused" in done.stderr and "missing.jsonl" in done.stderr
    assert not (place / "runs" / "refused").exists()
    number = json.loads((place / "runs" / "launches" / "refused" / "job.json").read_text())["job_id"]
    assert slurm.job(number)["ExitCode"] == "2:0" and slurm.job(number)["Restarts"] == "0"


def test_a_refusal_is_told_at_once_and_nothing_is_queued(slurm: Cluster, place: Path) -> None:
    done = subprocess.run(
        command("--name", "bad", "--set", "launch.slurm.partition=nowhere"), cwd=place, env=environment(slurm),
        text=True, capture_output=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 2 and "nowhere" not in slurm.run("squeue", "--noheader", "--format=%P")
    assert "invalid partition" in done.stderr
    assert not (place / "runs" / "launches" / "bad").exists()
