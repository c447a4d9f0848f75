"""The preflight on Ray: Ray places the ranks of a run, so it places those that measure too. Needs ray."""

import math
import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from shardwise.errors import RunError, ShardwiseError, UsageError
from shardwise.launch import preflight
from shardwise.launch.preflight import Where
from shardwise.launch.targets.parts import JOIN_SECONDS
from shardwise.launch.targets.ray import strategy

ANSWER_SECONDS = 10.0


class Probe:
    """One rank's place in the cluster; an actor of Ray, with the resources of a rank."""

    def place(self) -> tuple[str, str, int]:
        """Ray's name of the node, its address, and a port that is free there."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            port: int = probe.getsockname()[1]
        return ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address(), port

    def run(self, where: Where, number: int, environment: Mapping[str, str]) -> dict[str, Any]:
        """Measure as rank `number` of its node; what rank 0 returns is the result."""
        return preflight.measure(where, environment, only=number)


def connect(address: str, environment: Mapping[str, str]) -> None:
    """Join a cluster that is there; `environment` is what every process of this job gets.

    Raises UsageError when there is none.
    """
    try:
        host, _, port = address.rpartition(":")
        if port.isdecimal() and "/" not in host:  # Ray itself tries for ever where nobody listens
            socket.create_connection((host, int(port)), ANSWER_SECONDS).close()
        ray.init(address=address, runtime_env={"env_vars": dict(environment)}, log_to_driver=True)
    except (OSError, RuntimeError, ValueError, RayError) as problem:
        raise UsageError(
            f"no Ray cluster answers at '{address}'",
            " ".join(str(problem).split())[:300],
            "start one (ray start --head), or give its address (launch.ray.address, --ray ADDRESS)",
        ) from None


def measure(
    ranks: int, ranks_per_node: int, resources: Mapping[str, float], environment: Mapping[str, str],
    wait_seconds: float = JOIN_SECONDS,
) -> tuple[Where, dict[str, Any]]:  # fmt: skip
    """Have Ray place so many ranks, each with `resources`, and measure the links between them.

    Returns how the ranks really lie and what was measured. Nodes that got different numbers of ranks are taken
    apart into parts of equal size. Raises RunError when there is no room or a rank does not answer.
    """
    group = placement_group([dict(resources)] * ranks, strategy=strategy(ranks_per_node))
    try:
        if not group.wait(wait_seconds):
            have = {name: ray.cluster_resources().get(name, 0) for name in resources}
            raise RunError(
                f"Ray has no room for {ranks} ranks of {_amounts(resources)} each",
                f"waited {wait_seconds:.0f} s; the whole cluster has {_amounts(have)}",
                "launch on fewer nodes, or when others have ended; look with: ray status",
            )
        return _measure(group, ranks, resources, environment)
    finally:
        remove_placement_group(group)


def _measure(
    group: PlacementGroup, ranks: int, resources: Mapping[str, float], environment: Mapping[str, str]
) -> tuple[Where, dict[str, Any]]:
    actor: Any = ray.remote(Probe)
    probes: list[Any] = [
        actor.options(
            num_cpus=resources.get("CPU", 0),
            num_gpus=resources.get("GPU", 0),
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=number),
        ).remote()
        for number in range(ranks)
    ]
    try:
        places = ray.get([probe.place.remote() for probe in probes], timeout=JOIN_SECONDS)
        order, per_node = arrange([node for node, _, _ in places])
        _, head, port = places[order[0]]
        nodes = ranks // per_node
        wheres = [Where(nodes, rank // per_node, per_node, head, port) for rank in range(ranks)]
        results = [
            probes[which].run.remote(where, rank % per_node, dict(environment))
            for rank, (which, where) in enumerate(zip(order, wheres, strict=True))
        ]
        return wheres[0], next(found for found in ray.get(results) if found)
    except RayTaskError as problem:
        cause = problem.cause
        if isinstance(cause, ShardwiseError):
            raise cause from None
        raise RunError("a rank of the preflight failed", str(cause), "look into Ray's logs") from None
    except RayError as problem:  # an actor that died, a node that is gone
        raise RunError(
            "a rank of the preflight is gone", str(problem).splitlines()[0], "look with: ray status"
        ) from None
    finally:
        for probe in probes:
            ray.kill(probe)


def arrange(nodes: Sequence[str]) -> tuple[list[int], int]:
    """(numbers in the order of ranks: node by node; how many ranks count as one node)."""
    first = {node: number for number, node in reversed(list(enumerate(nodes)))}
    order = sorted(range(len(nodes)), key=lambda number: (first[nodes[number]], number))
    return order, math.gcd(*Counter(nodes).values())


def _amounts(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{amount:g} {name}" for name, amount in resources.items())
