"""What the generated driver and the workers of Ray Train do: every rank is a process of its own."""

import os
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray.train
from ray.train.collective import barrier, broadcast_from_rank_zero

from shardwise.errors import Interrupted, RunError, ShardwiseError, UsageError
from shardwise.launch import ray_links, wrapper
from shardwise.launch.cluster import ranks_of_a_node
from shardwise.launch.rank import run_rank
from shardwise.launch.wrapper import Started
from shardwise.runs import RunFolder

connect, end = ray_links.connect, wrapper.end


def begin(recipe: Path, name: str) -> Started:
    """Model, rows and run folder on the driver's node. Ends the process where the recipe is refused."""
    try:
        return wrapper.begin(recipe, name, owner=f"ray-{name}", attempt=str(time.time_ns()), lead=True)
    except ShardwiseError as problem:
        print(problem, file=sys.stderr, flush=True)
        wrapper.tell(recipe, 0, problem.exit_code, problem.what)
        sys.exit(problem.exit_code)


def look_at_links(started: Started, resources: Mapping[str, float]) -> None:
    """`launch.preflight`: where Ray puts the ranks, every one must answer. Raises RunError."""
    nodes, per_node = started.job.recipe.launch.nodes, ranks_of_a_node(started.job)
    where, measured = ray_links.measure(nodes * per_node, per_node, resources, started.environment)
    wrapper.tell_links(started, where, measured)
    if (where.nodes, where.ranks_per_node) != (nodes, per_node):
        lies = f"Ray has {where.nodes} x {where.ranks_per_node} ranks, the plan was made for {nodes} x {per_node}"
        print(f"! {lies}: its times do not hold here", file=sys.stderr, flush=True)
        started.run.event("warning", message=f"preflight: {lies} (nodes x ranks)")


def refuse(started: Started, problem: ShardwiseError) -> int:
    """Say why no rank was started, and write it down; nothing is left of a run that has no checkpoint yet.

    Returns the driver's exit code.
    """
    print(problem, file=sys.stderr, flush=True)
    code = problem.exit_code
    if code == UsageError.exit_code and started.run.checkpoints():
        code = RunError.exit_code  # a run of an earlier start: it stays
    return wrapper.finish(started, code, problem.what)


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
        wrapper.begin(Path(config["recipe"]), name, owner=f"ray-{name}", attempt="", lead=False)
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
