"""The lines of `--on torchrun`, really run: two agents on this machine as two nodes, one of them killed."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from shardwise.launch.ports import choose_port
from shardwise.runs import RunFolder

RECIPE = """
model: {model}
data: {{train: {data}, validation: 0, sequence_length: 128}}
method: full
engine: fsdp2
training: {{max_steps: 200, global_batch_size: 4, micro_batch_size: 1}}
optimizer: {{learning_rate: 1e-2}}
checkpoint: {{every_steps: 10}}
launch: {{nodes: 2, interface: lo, stop_seconds: 20}}
"""


def node(folder: Path, number: int, port: int) -> "subprocess.Popen[bytes]":
    environment = {
        **os.environ, "HEAD": "127.0.0.1", "PORT": str(port), "PET_LOCAL_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    with (folder / f"node-{number}.log").open("ab") as log:
        script = str(folder / "runs" / "launches" / "two" / "node.sh")
        return subprocess.Popen(["bash", script, str(number)], env=environment, stdout=log, stderr=log)


def test_a_killed_node_rejoins_and_the_run_ends_right(tmp_path, tiny_model, chat_file, shardwise) -> None:
    (tmp_path / "r.yaml").write_text(RECIPE.format(model=tiny_model, data=chat_file))
    said = shardwise("launch", "r.yaml", "--on", "torchrun", "--name", "two", cwd=tmp_path)
    assert said.returncode == 0 and said.stdout.count("node.sh") == 2, said.stderr
    run, port = RunFolder(tmp_path / "runs" / "two"), choose_port(None)
    agents = [node(tmp_path, number, port) for number in (0, 1)]
    try:
        deadline = time.monotonic() + 180
        while not run.checkpoints():
            assert time.monotonic() < deadline and agents[0].poll() is None, (
                tmp_path / "node-0.log"
            ).read_text()
            time.sleep(0.05)
        agents[1].send_signal(signal.SIGKILL)
        agents[1].wait()
        agents.append(node(tmp_path, 1, port))
        assert agents[0].wait(240) == 0, (tmp_path / "node-0.log").read_text()
        assert agents[2].wait(60) == 0, (tmp_path / "node-1.log").read_text()
    finally:
        for agent in agents:
            agent.kill()
            agent.wait()
    resumed = [e.model_dump()["step"] for e in run.events("resume")]
    assert len(resumed) == 1 and resumed[0] % 10 == 0 and resumed[0] > 0
    assert run.state == "done" and [s.step for s in run.steps()] == list(range(1, 201))
    left = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert str(run.path) not in left and sys.executable in left
