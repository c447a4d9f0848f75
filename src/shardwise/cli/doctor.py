"""`shardwise doctor`: what can and cannot run here."""

import json
import sys
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from shardwise.launch.diagnosis import Diagnosis
    from shardwise.launch.preflight import Preflight


@click.command()
@click.option("--build", is_flag=True, help="Compile DeepSpeed's operators now, once, with progress.")
@click.option(
    "--nodes", is_flag=False, flag_value=0, type=click.IntRange(min=0), metavar="[N]",
    help="Measure the links between ranks instead; started on every node at the same time. "
    "N is not needed under Slurm's srun, torchrun's variables or SkyPilot.",
)  # fmt: skip
@click.option("--node-rank", type=click.IntRange(min=0), help="This node's number, from 0.")
@click.option("--head", help="Name or address of node 0.")
@click.option("--port", type=click.IntRange(1, 65535), help="Port of node 0.  [default: 29401]")
@click.option(
    "--ranks", type=click.IntRange(min=1), help="Ranks of this node.  [default: one per GPU, or one]"
)
@click.option("--interface", help="Network interface between the nodes.")
@click.option(
    "--ray", "ray_address", is_flag=False, flag_value="auto", metavar="[ADDRESS]",
    help="With --nodes N: on a Ray cluster, which starts the ranks itself; called once.",
)  # fmt: skip
@click.option("--gpus", help="What the plan was made for, such as 8xH100-80GB.  [default: this machine]")
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
def doctor(
    build: bool,
    nodes: int | None,
    node_rank: int | None,
    head: str | None,
    port: int | None,
    ranks: int | None,
    interface: str | None,
    ray_address: str | None,
    gpus: str | None,
    as_json: bool,
) -> None:
    """What can and cannot run on this machine, and why: versions, devices, compilers, operators.

    With --nodes: does every rank answer, how fast are the links beside what a plan assumes, and which is slow.
    """
    if ray_address is not None:
        sys.exit(_links_on_ray(ray_address, nodes or 0, ranks, interface, gpus, as_json))
    if nodes is not None:
        asked = {"nodes": nodes or None, "node": node_rank, "head": head, "port": port}
        sys.exit(_links(asked, ranks, interface, gpus, as_json))
    from shardwise.launch import operators
    from shardwise.launch.diagnosis import diagnose

    found = diagnose()
    if build:
        device = "cuda" if found.torch and found.torch["gpus"] else "cpu"
        names = (
            operators.OPERATORS if device == "cpu" else [n for n in operators.OPERATORS if n != "shm_comm"]
        )
        operators.build(tuple(names), device, lambda text: click.echo(text, err=True))
        found = diagnose()
    if as_json:
        click.echo(json.dumps(as_data(found), indent=2))
    else:
        click.echo(as_text(found))


def _links(
    asked: dict[str, Any], ranks: int | None, interface: str | None, gpus: str | None, as_json: bool
) -> int:
    """Measure with the other nodes; the first node prints. Returns 1 when a link is slow."""
    import os

    from shardwise.facts.machine import as_offer
    from shardwise.launch import preflight

    offer = as_offer(gpus)
    here = as_offer(None)
    where = preflight.where_am_i(os.environ, asked, ranks or (here.count if here.gpu.kind == "cuda" else 1))
    if where.nodes * where.ranks_per_node == 1:
        click.echo("one rank has no links; on several nodes: shardwise doctor --nodes N", err=True)
        return 0
    measured = preflight.measure(where, _on_interface(interface))
    if not measured:
        click.echo(f"node {where.node} has measured its links; node 0 tells what was found", err=True)
        return 0
    return _tell_links(preflight.judge(measured, preflight.assumption(offer, where)), as_json)


def _links_on_ray(
    address: str, nodes: int, ranks: int | None, interface: str | None, gpus: str | None, as_json: bool
) -> int:
    """Measure where Ray places the ranks. Returns 1 when a link is slow."""
    from importlib.util import find_spec

    from shardwise.errors import MissingDependencyError, UsageError
    from shardwise.facts.machine import as_offer
    from shardwise.launch import preflight

    if find_spec("ray") is None:
        raise MissingDependencyError(
            "Ray is not installed here", "--ray asks Ray", "pip install 'ray[train]'"
        )
    if not nodes:
        raise UsageError("--ray without a number of nodes", "Ray does not say it", "use --nodes N --ray")
    from shardwise.launch import ray_links

    offer = as_offer(gpus)
    on_gpus = offer.gpu.kind == "cuda"
    per_node = ranks or (offer.count if on_gpus else 1)
    if nodes * per_node == 1:
        raise UsageError("one rank has no links", "--nodes 1 with one rank", "use more --nodes or --ranks")
    ray_links.connect(address, _on_interface(interface))
    resources = {"CPU": 1.0, **({"GPU": 1.0} if on_gpus else {})}
    where, measured = ray_links.measure(nodes * per_node, per_node, resources, {})
    return _tell_links(preflight.judge(measured, preflight.assumption(offer, where)), as_json)


def _on_interface(name: str | None) -> dict[str, str]:
    return dict.fromkeys(("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"), name) if name else {}


def _tell_links(found: "Preflight", as_json: bool) -> int:
    from dataclasses import asdict

    from shardwise.launch import preflight

    if as_json:
        click.echo(json.dumps({**asdict(found), "slow": [str(one) for one in found.slow]}, indent=2))
    else:
        click.echo(preflight.as_text(found))
    return 1 if found.slow else 0


def as_data(found: "Diagnosis") -> dict[str, Any]:
    """Plain data, stable keys."""
    machine = found.machine
    return {
        "python": found.python,
        "system": found.system,
        "cores": machine.cores,
        "memory_bytes": machine.memory_bytes,
        "available_bytes": machine.available_bytes,
        "free_disk_bytes": machine.free_disk_bytes,
        "processor": machine.processor,
        "gpus": [g.name for g in machine.gpus],
        "packages": found.packages,
        "too_old": list(found.too_old),
        "torch": found.torch,
        "torch_problem": found.torch_problem or None,
        "tools": found.tools,
        "operators": {s.name: {"state": s.state, "path": str(s.path), "pid": s.pid} for s in found.operators},
        "extensions_path": found.extensions_path,
        "abilities": {
            a.name: {"works": a.works, "why": a.why or None, "hint": a.hint or None} for a in found.abilities
        },
        "notes": list(found.notes),
    }


def as_text(found: "Diagnosis") -> str:
    """Readable without colour: + works, - does not."""
    from shardwise.units import format_bytes

    machine = found.machine
    lines = [
        f"shardwise {found.packages['shardwise']}, Python {found.python}, {found.system}",
        f"{machine.processor}: {machine.cores} cores, {format_bytes(machine.memory_bytes)} memory "
        f"({format_bytes(machine.available_bytes)} free), {format_bytes(machine.free_disk_bytes)} free disk",
        f"GPUs: {', '.join(g.name for g in machine.gpus) or 'none'}",
    ]
    if found.torch:
        seen = ", ".join(found.torch["gpus"]) or ("Apple GPU" if found.torch["mps"] else "the CPU only")
        lines.append(f"torch {found.torch['version']} sees {seen}")
    else:
        lines.append(f"torch: {found.torch_problem}")
    lines += ["", "Packages"]
    lines += [f"  {'+' if v else '-'} {name} {v or 'not installed'}" for name, v in found.packages.items()]
    lines += [f"  ! {old} is older than what shardwise is tested with" for old in found.too_old]
    lines += ["", "Tools"]
    lines += [f"  {'+' if path else '-'} {name}: {path or 'not found'}" for name, path in found.tools.items()]
    if found.operators:
        lines += ["", f"DeepSpeed's operators, in {found.extensions_path}"]
        for state in found.operators:
            mark = "+" if state.state == "built" else "-"
            detail = {
                "building": f"being compiled by process {state.pid}",
                "stale": "a killed build left its lock, on which DeepSpeed waits forever; "
                "cleared by: shardwise doctor --build",
                "missing": "not compiled yet; compiled by: shardwise doctor --build",
            }.get(state.state, "built")
            lines.append(f"  {mark} {state.name} ({state.purpose}): {detail}")
    lines += ["", "What can run here", "  + plan: always"]
    for ability in found.abilities:
        tail = f": {ability.why}" if ability.why else ""
        hint = f" ({ability.hint})" if ability.hint else ""
        lines.append(f"  {'+' if ability.works else '-'} {ability.name}{tail}{hint}")
    if found.notes:
        lines += ["", *[f"! {note}" for note in found.notes]]
    return "\n".join(lines)
