"""Before a run on several machines: does every rank answer, how fast are the links, and which one is slow?

Every node starts its ranks of `shardwise.training.links`; the first node reads what they measured and compares it
with what plans assume of these GPUs (estimate.speed.collectives).
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.errors import RunError, UsageError
from shardwise.estimate.speed.collectives import Group, group
from shardwise.facts.gpus import Offer
from shardwise.launch.guard import guarded
from shardwise.launch.targets.parts import PORT
from shardwise.units import format_bytes

# A link below this share of the better links of its kind is called slow. Between alike links 0.8 to 1 is usual;
# the usual faults (a card fallen back to a tenth, a cable's lane lost, TCP instead of RDMA) are far below.
SLOW_SHARE = 0.5
END_SECONDS = 600  # for all measurements; each transfer has a limit of its own
PORT_OFFSET = 1  # beside the port of the rendezvous, which may be taken already


@dataclass(frozen=True)
class Where:
    """This node's place among the nodes, and where rank 0 listens."""

    nodes: int
    node: int
    ranks_per_node: int
    head: str
    port: int


@dataclass(frozen=True)
class Level:
    """The links inside nodes, or between them. Rates are bytes per second of one rank in one direction."""

    name: str
    usual: float  # the better quarter's rate
    assumed: float

    @property
    def share(self) -> float:
        return self.usual / self.assumed


@dataclass(frozen=True)
class Slow:
    """What is slow, named as narrowly as the measurements allow."""

    what: str
    bytes_per_second: float
    others_bytes_per_second: float

    def __str__(self) -> str:
        return f"{self.what}: {_rate(self.bytes_per_second)}, the others reach {_rate(self.others_bytes_per_second)}"


@dataclass(frozen=True)
class Preflight:
    """What was measured, and what it means."""

    ranks: int
    nodes: int
    device: str
    all_reduce_bytes: int
    all_reduce_seconds: float
    assumed_seconds: float
    levels: tuple[Level, ...]
    slow: tuple[Slow, ...]


def where_am_i(environment: Mapping[str, str], asked: Mapping[str, Any], ranks_per_node: int) -> Where:
    """This node's place: what a person says (`nodes`, `node`, `head`, `port`), else what the scheduler says.

    Raises UsageError where neither says enough.
    """
    said = _scheduler(environment)
    nodes = asked.get("nodes") or said.get("nodes") or 1
    node = asked["node"] if asked.get("node") is not None else said.get("node", 0 if nodes == 1 else None)
    head = asked.get("head") or environment.get("MASTER_ADDR") or said.get("head")
    if nodes == 1:
        head = head or "127.0.0.1"
    if node is None or not head:
        raise UsageError(
            f"{nodes} nodes, but this one does not know {'its number' if node is None else 'the first node'}",
            "no scheduler has said it (Slurm's srun, torchrun's PET_*, SkyPilot)",
            "on every node: shardwise doctor --nodes N --node-rank NUMBER --head FIRST_NODE",
        )
    if not 0 <= int(node) < int(nodes):
        raise UsageError(f"--node-rank {node}", f"{nodes} nodes are numbered from 0", f"use 0 to {nodes - 1}")
    port = asked.get("port") or said.get("port") or PORT + PORT_OFFSET
    return Where(int(nodes), int(node), ranks_per_node, str(head), int(port))


def _scheduler(environment: Mapping[str, str]) -> dict[str, Any]:
    """What the scheduler that started this process says; empty outside of one."""
    if environment.get("SLURM_NODEID"):
        names = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
        return {
            "nodes": environment.get("SLURM_STEP_NUM_NODES") or environment.get("SLURM_JOB_NUM_NODES"),
            "node": environment["SLURM_NODEID"],
            "head": _first_host(names, environment),
            "port": 40000 + int(environment.get("SLURM_JOB_ID", 0)) % 20000,  # jobs may share a node
        }
    if environment.get("PET_NODE_RANK"):
        return {
            "nodes": environment.get("PET_NNODES"),
            "node": environment["PET_NODE_RANK"],
            "head": environment.get("PET_MASTER_ADDR"),
        }
    if environment.get("SKYPILOT_NODE_RANK"):
        addresses = environment.get("SKYPILOT_NODE_IPS", "").split()
        return {
            "nodes": len(addresses),
            "node": environment["SKYPILOT_NODE_RANK"],
            "head": next(iter(addresses), None),
        }
    return {}


def _first_host(names: str, environment: Mapping[str, str]) -> str | None:
    """The first of Slurm's `n[1-4]`, unless the environment names the rendezvous itself."""
    if not names or environment.get("MASTER_ADDR"):
        return None
    done = subprocess.run(
        ["scontrol", "show", "hostnames", names], capture_output=True, text=True, check=False, timeout=60
    )
    return next(iter(done.stdout.split()), None)


def assumption(offer: Offer, where: Where) -> Group:
    """What plans for these devices take for granted."""
    return group(offer.gpu, where.nodes * where.ranks_per_node, where.ranks_per_node)


def judge(found: Mapping[str, Any], assumed: Group) -> Preflight:
    """Compare the ranks' measurements with each other and with the plan. Pure."""
    places = {p["rank"]: p for p in found["places"]}
    nodes = 1 + max(p["node"] for p in places.values())
    kinds: dict[str, list[Mapping[str, Any]]] = {"inside nodes": [], "between nodes": []}
    for one in found["sent"]:
        same = places[one["source"]]["node"] == places[one["target"]]["node"]
        kinds["inside nodes" if same else "between nodes"].append(one)
    expected = {
        "inside nodes": assumed.inside_bytes_per_second,
        "between nodes": assumed.between_bytes_per_second / (len(places) // nodes),
    }
    levels, slow = [], []
    for name, sent in kinds.items():
        if not sent:
            continue
        usual = _upper(one["bytes_per_second"] for one in sent)
        levels.append(Level(name, usual, expected[name]))
        slow += _slow(sent, places, usual)
    reduce = found["all_reduce"]
    return Preflight(
        ranks=len(places),
        nodes=nodes,
        device=found["device"],
        all_reduce_bytes=reduce["bytes"],
        all_reduce_seconds=reduce["seconds"],
        assumed_seconds=assumed.reduce_seconds(reduce["bytes"]),
        levels=tuple(levels),
        slow=tuple(slow),
    )


def _upper(rates: Any) -> float:
    """The rate that a quarter of the links reach: one bad node of three spoils more than half of them."""
    ordered = sorted(rates)
    return float(ordered[-(-3 * (len(ordered) - 1) // 4)])


def _slow(sent: Sequence[Mapping[str, Any]], places: Mapping[int, Any], usual: float) -> list[Slow]:
    """A node whose every link in one direction is slow; else a rank; else the single links."""
    bad = [one for one in sent if one["bytes_per_second"] < SLOW_SHARE * usual]
    found: list[Slow] = []
    for verb, end in (("sends", "source"), ("receives", "target")):
        for unit in ("node", "rank"):

            def of(one: Mapping[str, Any], end: str = end, unit: str = unit) -> int:
                number: int = places[one[end]][unit]
                return number

            for number in sorted({of(one) for one in bad}):
                all_of_it = [one for one in sent if of(one) == number]
                if len(all_of_it) == 1 or not all(one in bad for one in all_of_it):
                    continue
                place = next(p for p in places.values() if p[unit] == number)
                best = max(one["bytes_per_second"] for one in all_of_it)
                found.append(Slow(f"{_named(place, unit)} {verb} slowly", best, usual))
                bad = [one for one in bad if of(one) != number]
    for one in bad:
        source, target = places[one["source"]], places[one["target"]]
        unit = "node" if source["node"] != target["node"] and len(places) == len(_nodes(places)) else "rank"
        what = f"the link from {_named(source, unit)} to {_named(target, unit)} is slow"
        found.append(Slow(what, one["bytes_per_second"], usual))
    return found


def _nodes(places: Mapping[int, Any]) -> set[int]:
    return {p["node"] for p in places.values()}


def _named(place: Mapping[str, Any], unit: str) -> str:
    if unit == "node":
        return f"node {place['node']} ({place['host']})"
    return f"rank {place['rank']} (GPU {place['local_rank']} of node {place['node']}, {place['host']})"


def as_text(found: Preflight) -> str:
    """For people: measured beside assumed, then what is slow."""
    lines = [
        f"preflight: {found.ranks} ranks on {found.nodes} node{'s' if found.nodes > 1 else ''}, all answer",
        f"  all-reduce of {format_bytes(found.all_reduce_bytes)}: {found.all_reduce_seconds * 1e3:.1f} ms measured, "
        f"{found.assumed_seconds * 1e3:.1f} ms assumed by the plan",
    ]
    for level in found.levels:
        lines.append(
            f"  {level.name}, one rank to another: {_rate(level.usual)} measured, {_rate(level.assumed)} assumed "
            f"by the plan ({level.share:.0%})"
        )
    lines += [f"! {one}" for one in found.slow]
    lines += [
        f"! {level.name} the links reach {level.share:.0%} of what the plan assumes: its times do not hold here"
        for level in found.levels
        if level.share < SLOW_SHARE
    ]
    return "\n".join(lines)


def _rate(bytes_per_second: float) -> str:
    if bytes_per_second < 1e9:
        return f"{bytes_per_second / 1e6:.3g} MB/s"
    return f"{bytes_per_second / 1e9:.3g} GB/s"


def measure(where: Where, environment: Mapping[str, str], only: int | None = None) -> dict[str, Any]:
    """Start this node's ranks, or `only` one of them, wait, and return what rank 0 wrote (empty elsewhere).

    Raises RunError with the first rank's own words when one of them failed.
    """
    numbers = range(where.ranks_per_node) if only is None else (only,)
    with tempfile.TemporaryDirectory(prefix="shardwise-preflight-") as folder:
        result = Path(folder) / "links.json"
        ranks = [_start(where, number, result, environment) for number in numbers]
        try:
            _wait(ranks)
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
        for number, rank in zip(numbers, ranks, strict=True):
            if rank.returncode:
                said = result.with_name(f"{number}.log").read_text(errors="replace").strip()
                raise _failure(where.node * where.ranks_per_node + number, said)
        return dict(json.loads(result.read_text())) if result.exists() else {}


def _start(
    where: Where, number: int, result: Path, environment: Mapping[str, str]
) -> "subprocess.Popen[bytes]":
    variables = {
        "RANK": where.node * where.ranks_per_node + number,
        "WORLD_SIZE": where.nodes * where.ranks_per_node,
        "LOCAL_RANK": number,
        "LOCAL_WORLD_SIZE": where.ranks_per_node,
        "MASTER_ADDR": where.head,
        "MASTER_PORT": where.port,
        "OMP_NUM_THREADS": 1,
    }
    if where.nodes == 1:  # gloo asks for the host's own name otherwise, which need not resolve
        environment = {"GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo", **environment}
    with result.with_name(f"{number}.log").open("wb") as log:
        return subprocess.Popen(
            guarded([sys.executable, "-m", "shardwise.training.links", str(result)]),
            stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            env={**os.environ, **environment, **{k: str(v) for k, v in variables.items()}},
        )  # fmt: skip


def _wait(ranks: "Sequence[subprocess.Popen[bytes]]") -> None:
    """Until all have ended or one has failed."""
    deadline = time.monotonic() + END_SECONDS
    while any(rank.poll() is None for rank in ranks):
        if any(rank.returncode for rank in ranks):
            time.sleep(1.0)  # the others' last words
            return
        if time.monotonic() > deadline:
            raise RunError(
                "the preflight has not ended", f"waited {END_SECONDS} s", "try it again with fewer nodes"
            )
        time.sleep(0.05)


def _failure(rank: int, said: str) -> RunError:
    lines = said.splitlines()
    start = next((n for n, line in enumerate(lines) if line.startswith("error: ")), None)
    if start is not None and len(lines) >= start + 3:  # its own three lines
        what, why, hint = (line.partition(": ")[2] for line in lines[start : start + 3])
        return RunError(what, why, hint)
    return RunError(
        f"the preflight of rank {rank} failed",
        lines[-1] if lines else "it said nothing",
        "a link that breaks here would break training too: try shardwise doctor --nodes with fewer nodes",
    )
