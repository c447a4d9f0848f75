"""How fast ranks reach each other, before anything is trained: `python -m shardwise.training.links RESULT.json`.

Started by shardwise.launch.preflight as one process per rank, with the variables torchrun sets. The ranks

1. say hello in the store, so that one that is missing is named instead of waited for;
2. all-reduce one large tensor;
3. send to each other in pairs, first inside every node, then between nodes. Rounds of a tournament: every rank
   has one partner at a time, so a pair is measured without a third rank on its link.

Between nodes rank i of one node talks to rank i of the other, as rings over network cards do ("rails"). Rank 0
writes what was measured; what it means is decided where the plan is known.
"""

import json
import os
import platform
import sys
import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from shardwise.errors import RunError, ShardwiseError
from shardwise.training import leave

MEET_SECONDS = 60.0  # for all ranks to say hello; SHARDWISE_MEET_SECONDS changes it
ANSWER_SECONDS = 60.0  # for one transfer: a link slower than 1 MB/s counts as broken
# The best of so many counts, over so many seconds at least: other work on a machine only ever makes one slower.
REPEATS, SECONDS = 5, 0.25
LARGEST_TOURNAMENT = 16  # nodes; beyond, every node meets 15 others instead of all
# (all-reduce, one message) in bytes: large enough that latency does not count.
SIZES = {"cpu": (16 * 2**20, 4 * 2**20), "cuda": (256 * 2**20, 64 * 2**20)}


@dataclass(frozen=True)
class Place:
    """Where a rank is."""

    rank: int
    node: int
    local_rank: int
    host: str


@dataclass(frozen=True)
class Sent:
    """The best rate of one direction of one pair, as the receiver saw it."""

    source: int
    target: int
    bytes_per_second: float


def tournament(players: int, rounds: int | None = None) -> list[list[tuple[int, int]]]:
    """Pairs by round (circle method): nobody plays twice in a round, and everybody meets everybody once.

    `rounds` cuts it short. Odd numbers leave one player out of each round.
    """
    circle: list[int | None] = [*range(players), *([None] if players % 2 else [])]
    half, found = len(circle) // 2, []
    for _ in range(len(circle) - 1):
        pairs = zip(circle[:half], reversed(circle[half:]), strict=True)
        found.append([(min(a, b), max(a, b)) for a, b in pairs if a is not None and b is not None])
        circle = [circle[0], circle[-1], *circle[1:-1]]
    return found[:rounds]


def main(arguments: list[str]) -> int:
    """One rank. Returns its exit code."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    per_node = int(os.environ["LOCAL_WORLD_SIZE"])
    place = Place(rank, rank // per_node, rank % per_node, platform.node())
    device = _device(place.local_rank)
    try:
        store = _meet(rank, world)
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=store, rank=rank, world_size=world, timeout=timedelta(seconds=ANSWER_SECONDS),
            device_id=device if device.type == "cuda" else None,
        )  # fmt: skip
        try:
            found = _measure(place, world, per_node, device)
        finally:
            dist.destroy_process_group()
    except ShardwiseError as problem:
        print(str(problem), file=sys.stderr, flush=True)
        return problem.exit_code
    if rank == 0:
        Path(arguments[0]).write_text(json.dumps(found), encoding="utf-8")
    return 0


def _meet(rank: int, world: int) -> dist.Store:
    """The store, once every rank is there. Raises RunError naming the ranks that are not."""
    seconds = float(os.environ.get("SHARDWISE_MEET_SECONDS", MEET_SECONDS))
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    try:
        store = dist.TCPStore(
            address, port, None, rank == 0, timedelta(seconds=seconds), wait_for_workers=False
        )
    except (dist.DistNetworkError, dist.DistStoreError, RuntimeError) as problem:
        raise RunError(
            f"rank {rank} on {platform.node()} cannot reach {address}:{port}",
            str(problem).splitlines()[0],
            "is the first node up, its port open, and the name right on this node?",
        ) from None
    store.set(f"hello/{rank}", platform.node())
    deadline = time.monotonic() + seconds
    missing = list(range(world))
    while missing:
        missing = [r for r in missing if not store.check([f"hello/{r}"])]
        if missing and time.monotonic() > deadline:
            raise RunError(
                f"rank(s) {', '.join(map(str, missing))} of {world} have not appeared",
                f"waited {seconds:.0f} s at {address}:{port}",
                "look at the nodes they belong to: are they started, and can they reach that address?",
            )
        time.sleep(0.1)
    return store


def _measure(place: Place, world: int, per_node: int, device: torch.device) -> dict[str, object]:
    """Everything, in the same order on every rank; complete on rank 0."""
    reduce_bytes, message_bytes = SIZES[device.type]
    places: list[Place] = [place] * world
    dist.all_gather_object(places, place)
    reduce_seconds = _all_reduce(reduce_bytes, device)
    buffer = torch.ones(message_bytes // 4, device=device)
    nodes, sent = world // per_node, []
    first = place.node * per_node
    for pairs in tournament(per_node):
        sent += _round([(first + a, first + b) for a, b in pairs], place.rank, buffer)
    for pairs in tournament(nodes, LARGEST_TOURNAMENT - 1):
        here = [(a * per_node + place.local_rank, b * per_node + place.local_rank) for a, b in pairs]
        sent += _round(here, place.rank, buffer)
    everyone: list[list[Sent]] = [[]] * world
    dist.all_gather_object(everyone, sent)
    return {
        "device": device.type,
        "places": [asdict(p) for p in places],
        "all_reduce": {"bytes": reduce_bytes, "seconds": reduce_seconds},
        "sent": [asdict(s) for one in everyone for s in one],
    }


def _all_reduce(size_bytes: int, device: torch.device) -> float:
    """Seconds of the best of REPEATS."""
    tensor, times = torch.ones(size_bytes // 4, device=device), []
    for _ in range(1 + REPEATS):  # the first sets up connections
        dist.barrier()
        _wait(device)
        began = time.perf_counter()
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        _wait(device)
        times.append(time.perf_counter() - began)
    slowest = torch.tensor(times[1:], device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return float(slowest.min())


def _round(pairs: list[tuple[int, int]], rank: int, buffer: torch.Tensor) -> list[Sent]:
    """Both directions of this rank's pair, one after the other; what this rank received. Others wait."""
    found = []
    for low, high in pairs:
        for source, target in ((low, high), (high, low)):
            if rank == source:
                _send(target, buffer)
            elif rank == target:
                found.append(Sent(source, target, _receive(source, buffer)))
    dist.barrier()
    return found


def _send(peer: int, buffer: torch.Tensor) -> None:
    """Send as often as `peer` asks for it."""
    asked = torch.zeros(1, device=buffer.device)
    while True:
        dist.recv(asked, peer)
        if not asked.item():
            return
        dist.send(buffer, peer)


def _receive(peer: int, buffer: torch.Tensor) -> float:
    """Bytes per second from `peer`, by this rank's clock: every message is asked for when it can be taken."""
    best, began, number = float("inf"), time.perf_counter(), 0
    while number <= REPEATS or time.perf_counter() - began < SECONDS:
        dist.send(torch.ones(1, device=buffer.device), peer)
        _wait(buffer.device)
        asked = time.perf_counter()
        dist.recv(buffer, peer)
        _wait(buffer.device)
        if number:  # the first sets up connections
            best = min(best, time.perf_counter() - asked)
        number += 1
    dist.send(torch.zeros(1, device=buffer.device), peer)
    return buffer.numel() * buffer.element_size() / best


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _device(local_rank: int) -> torch.device:
    if os.environ.get("SHARDWISE_LINKS_DEVICE") == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device(
        "cuda", local_rank % torch.cuda.device_count()
    )  # a rank on Ray sees its own GPU alone
    torch.cuda.set_device(device)
    return device


if __name__ == "__main__":
    leave.run(main)
