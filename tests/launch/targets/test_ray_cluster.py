"""`launch --on ray` on a local Ray cluster of two workers, one of them killed; skipped where Ray is not installed."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
from uninterrupted import STEPS, losses, recipe

from shardwise.launch.ports import choose_port
from shardwise.runs import RunFolder

pytest.importorskip("ray.train", reason="Ray Train is not installed")


SECRET = "hf_wVeryMuchASecret"


@pytest.fixture
def ray_folder(tmp_path_factory) -> Path:
    """Where Ray keeps its logs and sockets."""
    return tmp_path_factory.mktemp("ray")


@pytest.fixture
def ray_port(ray_folder: Path) -> Iterator[int]:
    port, folder = choose_port(None), ray_folder
    with (folder / "head.log").open("wb") as log:
        head = subprocess.Popen(
            [
                sys.executable, "-c", "from ray.scripts.scripts import main; main()", "start", "--head", "--block",
                "--num-cpus=2", "--include-dashboard=false", f"--port={port}", "--node-ip-address=127.0.0.1",
                "--object-store-memory=100000000", f"--temp-dir={folder}", "--disable-usage-stats",
            ],
            stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
    try:
        deadline = time.monotonic() + 60
        while b"Ray runtime started" not in (folder / "head.log").read_bytes():
            assert head.poll() is None and time.monotonic() < deadline, (folder / "head.log").read_text()
            time.sleep(0.2)
        yield port
    finally:
        head.kill()
        head.wait()
        for process in Path("/proc").glob("[0-9]*"):  # what the head started names our folder and no other
            with suppress(OSError):
                if str(folder).encode() in (process / "cmdline").read_bytes():
                    os.kill(int(process.name), signal.SIGKILL)


def worker_of_rank(run: RunFolder, rank: int) -> int:
    """The process of Ray's that started a rank: the parent of the one that trains in this run's folder.

    The rank has the secret that the recipe names.
    """
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words = (process / "cmdline").read_bytes().split(b"\0")
            mine = b"shardwise.training" in words and str(run.path.resolve()).encode() in words
            environ = (process / "environ").read_bytes().split(b"\0")
            if mine and f"RANK={rank}".encode() in environ:
                assert f"TEST_TOKEN={SECRET}".encode() in environ
                return int((process / "stat").read_text().rsplit(")", 1)[1].split()[1])
    raise AssertionError("no such rank")


def test_a_killed_ray_worker_is_replaced_and_the_losses_are_those_of_a_run_without_ray(
    ray_port: int,
    ray_folder: Path,
    tmp_path: Path,
    tiny_model: Path,
    chat_file: Path,
    whole_losses: list[tuple[int, float]],
) -> None:
    launch = (
        f"{{nodes: 2, interface: lo, environment: [TEST_TOKEN], preflight: true, "
        f'ray: {{address: "127.0.0.1:{ray_port}"}}}}'
    )
    (tmp_path / "r.yaml").write_text(recipe(tiny_model, chat_file, 10, launch))
    run = RunFolder(tmp_path / "runs" / "two")
    following = subprocess.Popen(
        [sys.executable, "-m", "shardwise.cli.main", "launch", "r.yaml", "--on", "ray", "--name", "two"],
        cwd=tmp_path, text=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        env={**os.environ, "TEST_TOKEN": SECRET},
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 180
        while not run.checkpoints():
            assert following.poll() is None and time.monotonic() < deadline, "no checkpoint yet"
            time.sleep(0.05)
        os.kill(worker_of_rank(run, 1), signal.SIGKILL)
        _, said = following.communicate(timeout=300)
    finally:
        following.kill()
        following.wait()
    assert following.returncode == 0, said
    resumed = [e.model_dump()["step"] for e in run.events("resume")]
    assert len(resumed) == 1 and 0 < resumed[0] < STEPS and resumed[0] % 10 == 0, said
    assert next(e.model_dump() for e in run.events("start"))["world_size"] == 2
    assert run.state == "done" and [step for step, _ in losses(run)] == list(range(1, STEPS + 1))
    assert losses(run) == whole_losses
    measured = json.loads((run.logs_path / "links.json").read_text())
    assert sorted((one["source"], one["target"]) for one in measured["sent"]) == [(0, 1), (1, 0)]
    log = (tmp_path / "runs" / "launches" / "two" / "driver.log").read_text()
    assert "preflight: 2 ranks on 1 node, all answer" in log and "assumed by the plan" in log
    warned = [e.model_dump()["message"] for e in run.events("warning")]
    assert [text for text in warned if "Ray has 1 x 2 ranks, the plan was made for 2 x 1" in text], warned
    written = [path for folder in (tmp_path, ray_folder) for path in folder.rglob("*") if path.is_file()]
    assert len(written) > 50 and not [path for path in written if SECRET.encode() in path.read_bytes()]


def test_the_doctor_measures_where_ray_places_the_ranks(ray_port: int, shardwise) -> None:
    """Then more ranks than there is room for: told, not waited for without an end."""
    said = shardwise("doctor", "--nodes", 2, "--ray", f"127.0.0.1:{ray_port}", "--interface", "lo", "--json")
    report = json.loads(said.stdout)
    assert said.returncode in (0, 1) and (report["ranks"], report["nodes"]) == (2, 1), said.stderr
    assert report["levels"][0]["usual"] > 1e6 and report["levels"][0]["assumed"] > 0
    import ray

    from shardwise.errors import RunError
    from shardwise.launch import ray_links

    ray_links.connect(f"127.0.0.1:{ray_port}", {})
    try:
        with pytest.raises(RunError, match="no room for 3 ranks") as refused:
            ray_links.measure(3, 1, {"CPU": 1}, {}, wait_seconds=1)
        assert "2 CPU" in refused.value.why
    finally:
        ray.shutdown()


def test_ranks_are_numbered_node_by_node_and_uneven_nodes_are_taken_apart() -> None:
    from shardwise.launch.ray_links import arrange

    assert arrange(["b", "a", "b", "a"]) == ([0, 2, 1, 3], 2)
    assert arrange(["a", "a", "b", "a"]) == ([0, 1, 3, 2], 1)


def test_where_no_cluster_answers_the_run_is_refused_and_leaves_nothing(
    tmp_path: Path, tiny_model: Path, chat_file: Path, shardwise
) -> None:
    launch = f'{{nodes: 2, ray: {{address: "127.0.0.1:{choose_port(None)}"}}}}'
    (tmp_path / "r.yaml").write_text(recipe(tiny_model, chat_file, 10, launch))
    done = shardwise("launch", "r.yaml", "--on", "ray", "--name", "no", cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert "no Ray cluster answers" in done.stderr and "refused" in done.stderr
    assert not (tmp_path / "runs" / "no").exists() and "Traceback" not in done.stderr


def test_a_recipe_that_is_refused_on_ray_tells_so_by_its_exit_code(tmp_path: Path, tiny_model: Path) -> None:
    """No cluster is needed: the driver refuses before it connects."""
    (tmp_path / "r.yaml").write_text(recipe(tiny_model, Path("missing.jsonl"), 10, "{nodes: 2}"))
    done = subprocess.run(
        [sys.executable, "-m", "shardwise.cli.main", "launch", "r.yaml", "--on", "ray", "--name", "no"],
        cwd=tmp_path, text=True, capture_output=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert "no is refused" in done.stderr and "missing.jsonl" in done.stderr
    assert not (tmp_path / "runs" / "no").exists()
