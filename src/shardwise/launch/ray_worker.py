"""What a worker of Ray Train does: run one rank in a process of its own. Imported by the generated driver only."""

import os
import socket
from pathlib import Path
from typing import Any

import ray.train
from ray.train.collective import barrier, broadcast_from_rank_zero

from shardwise.errors import Interrupted, RunError
from shardwise.launch.rank import run_rank
from shardwise.launch.wrapper import begin
from shardwise.runs import RunFolder


def rank(config: dict[str, Any]) -> None:
    """One rank. Raises RunError when it failed, which makes Ray start all of them again.

    The rank is a process of its own because training takes signals and makes its own process group, while Ray
    calls this in a thread of a process that has one. It dies with this worker.
    """
    os.chdir(config["directory"])  # relative paths of the recipe start where it was launched
    context = ray.train.get_context()
    number = context.get_world_rank()
    if context.get_local_rank() == 0 and ray.util.get_node_ip_address() != config["ready"]:
        name = Path(config["run"]).name  # the driver has made its own node ready: model, rows, operators
        begin(Path(config["recipe"]), name, owner=f"ray-{name}", attempt="", lead=False)
    barrier()
    address, port = broadcast_from_rank_zero(_rendezvous() if number == 0 else None)
    code = run_rank(
        RunFolder(config["run"]),
        {
            **os.environ,
            **config["environment"],
            **ray.get(config["secrets"][0]),
            "RANK": str(number),
            "WORLD_SIZE": str(context.get_world_size()),
            "LOCAL_RANK": str(context.get_local_rank()),
            "LOCAL_WORLD_SIZE": str(context.get_local_world_size()),
            "MASTER_ADDR": address,
            "MASTER_PORT": str(port),
        },
        echo=True,
    )
    if code not in (0, 2, Interrupted.exit_code):  # refused or stopped: another try is not wanted
        raise RunError(f"rank {number} ended with exit code {code}", f"its log: {config['run']}/logs", "")


def _rendezvous() -> tuple[str, int]:
    """A free port of this node; Ray's own group keeps the one it chose."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return ray.util.get_node_ip_address(), probe.getsockname()[1]
