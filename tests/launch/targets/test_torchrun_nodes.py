"""The lines of `--on torchrun`, really run: two agents as two nodes, one of them killed.

Each node is a network namespace with an address of its own, where this machine makes them; else both agents share
its loopback, which a warning says.
"""

import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
import networks
from uninterrupted import STEPS, losses, recipe

from shardwise.launch.ports import choose_port
from shardwise.runs import RunFolder


@pytest.fixture
def machines() -> Iterator[list[networks.Host]]:
    """Two of them; without namespaces, twice this one."""
    lacking = networks.missing()
    if lacking:
        warnings.warn(f"both agents run on this machine's loopback: {lacking}", stacklevel=1)
        yield [networks.HERE, networks.HERE]
    else:
        with networks.hosts(2) as found:
            yield found


def node(folder: Path, number: int, machines: list[networks.Host], port: int) -> "subprocess.Popen[bytes]":
    """PET_LOCAL_ADDR: the names of these nodes do not resolve, as names on a cluster do."""
    environment = {
        **os.environ, "HEAD": machines[0].address, "PORT": str(port), "PET_LOCAL_ADDR": machines[number].address,
        "OMP_NUM_THREADS": "1", "SHARDWISE_CACHE": str(folder / f"cache-of-node-{number}"),
    }  # fmt: skip
    script = str(folder / "runs" / "launches" / "two" / "node.sh")
    with (folder / f"node-{number}.log").open("ab") as log:
        return subprocess.Popen(
            [*machines[number].run, "bash", script, str(number)], env=environment, stdout=log, stderr=log
        )


def test_a_killed_node_rejoins_and_the_run_ends_right(
    machines: list[networks.Host], tmp_path: Path, tiny_model: Path, chat_file: Path, shardwise, whole_losses
) -> None:
    launch = f"{{nodes: 2, interface: {machines[0].interface}, stop_seconds: 20}}"
    (tmp_path / "r.yaml").write_text(recipe(tiny_model, chat_file, 10, launch))
    said = shardwise("launch", "r.yaml", "--on", "torchrun", "--name", "two", cwd=tmp_path)
    assert said.returncode == 0 and said.stdout.count("node.sh") == 2, said.stderr
    run, port = RunFolder(tmp_path / "runs" / "two"), choose_port(None)
    agents = [node(tmp_path, number, machines, port) for number in (0, 1)]
    try:
        deadline = time.monotonic() + 180
        while not run.checkpoints():
            assert time.monotonic() < deadline and agents[0].poll() is None, (
                tmp_path / "node-0.log"
            ).read_text()
            time.sleep(0.05)
        agents[1].send_signal(signal.SIGKILL)
        agents[1].wait()
        agents.append(node(tmp_path, 1, machines, port))
        assert agents[0].wait(240) == 0, (tmp_path / "node-0.log").read_text()
        assert agents[2].wait(60) == 0, (tmp_path / "node-1.log").read_text()
    finally:
        for agent in agents:
            agent.kill()
            agent.wait()
    resumed = [e.model_dump()["step"] for e in run.events("resume")]
    assert len(resumed) == 1 and resumed[0] % 10 == 0 and 0 < resumed[0] < STEPS
    assert run.state == "done" and losses(run) == whole_losses
    began = next(e.time for e in run.events("start"))
    for number in (0, 1):  # each node had its rows in a cache of its own before the ranks started
        rows = [
            path for path in (tmp_path / f"cache-of-node-{number}" / "data").rglob("*.*") if path.is_file()
        ]
        assert rows and max(path.stat().st_mtime for path in rows) < began
    left = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert str(run.path) not in left and sys.executable in left


def test_a_cancelled_run_saves_stops_and_says_so_by_its_exit_code(
    tmp_path: Path, tiny_model: Path, chat_file: Path, shardwise
) -> None:
    """The stop file, which is how runs on torchrun and Ray are cancelled."""
    text = recipe(tiny_model, chat_file, 0, "{nodes: 1, stop_seconds: 20}").replace("fsdp2", "single")
    (tmp_path / "r.yaml").write_text(text.replace(f"max_steps: {STEPS}", "max_steps: 20000"))
    assert shardwise("launch", "r.yaml", "--on", "torchrun", "--name", "two", cwd=tmp_path).returncode == 0
    run = RunFolder(tmp_path / "runs" / "two")
    agent = node(tmp_path, 0, [networks.HERE], choose_port(None))
    try:
        deadline = time.monotonic() + 120
        while len(run.steps()) < 2:
            assert time.monotonic() < deadline and agent.poll() is None, (tmp_path / "node-0.log").read_text()
            time.sleep(0.05)
        assert shardwise("cancel", "two", cwd=tmp_path).returncode == 0
        assert agent.wait(60) == 75, (tmp_path / "node-0.log").read_text()
    finally:
        agent.kill()
        agent.wait()
    assert run.state == "interrupted" and run.checkpoints()
