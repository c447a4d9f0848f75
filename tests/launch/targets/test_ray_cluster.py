"""`launch --on ray` on a local Ray cluster of two workers; skipped where Ray is not installed."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from shardwise.launch.ports import choose_port
from shardwise.runs import RunFolder

pytest.importorskip("ray.train", reason="Ray Train is not installed")

RECIPE = """
model: {model}
data: {{train: {data}, validation: 0, sequence_length: 128}}
method: full
engine: fsdp2
training: {{max_steps: 6, global_batch_size: 4, micro_batch_size: 1}}
optimizer: {{learning_rate: 1e-2}}
launch: {{nodes: 2, interface: lo, ray: {{address: "127.0.0.1:{port}"}}}}
"""


@pytest.fixture
def ray_port(tmp_path_factory):
    port, folder = choose_port(None), tmp_path_factory.mktemp("ray")
    head = subprocess.Popen(
        [
            sys.executable, "-c", "from ray.scripts.scripts import main; main()", "start", "--head", "--block",
            "--num-cpus=2", "--include-dashboard=false", f"--port={port}", "--node-ip-address=127.0.0.1",
            "--object-store-memory=100000000", f"--temp-dir={folder}",
        ],
        env={**os.environ, "RAY_USAGE_STATS_ENABLED": "0"}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        start_new_session=True,
    )  # fmt: skip
    try:
        time.sleep(10)
        assert head.poll() is None
        yield port
    finally:
        head.kill()
        head.wait()
        for process in Path("/proc").glob("[0-9]*"):  # what the head started names our folder and no other
            with suppress(OSError):
                if str(folder).encode() in (process / "cmdline").read_bytes():
                    os.kill(int(process.name), signal.SIGKILL)


def test_two_ray_workers_run_the_recipe(
    ray_port: int, tmp_path: Path, tiny_model, chat_file, shardwise
) -> None:
    (tmp_path / "r.yaml").write_text(RECIPE.format(model=tiny_model, data=chat_file, port=ray_port))
    done = shardwise("launch", "r.yaml", "--on", "ray", "--name", "two", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    run = RunFolder(tmp_path / "runs" / "two")
    assert next(e.model_dump() for e in run.events("start"))["world_size"] == 2
    assert run.state == "done" and [s.step for s in run.steps()] == list(range(1, 7))
