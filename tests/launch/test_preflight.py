"""`shardwise doctor --nodes`: real ranks on real (virtual) links, one of them slow; and what measurements mean."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import networks

from shardwise.errors import UsageError
from shardwise.estimate.speed.collectives import Group
from shardwise.launch import preflight
from shardwise.launch.preflight import Where, as_text, judge, where_am_i

ASSUMED = Group(8, 4, inside_bytes_per_second=200e9, between_bytes_per_second=160e9)


def found(nodes: int, per_node: int, rate) -> dict:
    """A measurement of every pair; `rate(source, target)` in bytes per second."""
    places = [
        {"rank": r, "node": r // per_node, "local_rank": r % per_node, "host": f"h{r // per_node}"}
        for r in range(nodes * per_node)
    ]
    pairs = [
        (a, b)
        for a in range(len(places))
        for b in range(len(places))
        if a != b and (a // per_node == b // per_node or a % per_node == b % per_node)
    ]
    sent = [{"source": a, "target": b, "bytes_per_second": rate(a, b)} for a, b in pairs]
    return {"device": "cuda", "places": places, "sent": sent, "all_reduce": {"bytes": 2**28, "seconds": 0.01}}


def usual(a: int, b: int) -> float:
    return 150e9 if a // 4 == b // 4 else 40e9


def test_even_links_are_not_called_slow() -> None:
    verdict = judge(found(3, 4, usual), ASSUMED)
    assert verdict.slow == ()
    assert [(level.name, round(level.share, 2)) for level in verdict.levels] == [
        ("inside nodes", 0.75), ("between nodes", 1.0),
    ]  # fmt: skip


def test_a_node_whose_every_link_is_slow_is_named_once_each_way() -> None:
    verdict = judge(
        found(3, 4, lambda a, b: 2e9 if 1 in (a // 4, b // 4) and a // 4 != b // 4 else usual(a, b)), ASSUMED
    )
    assert [str(one).split(":")[0] for one in verdict.slow] == [
        "node 1 (h1) sends slowly", "node 1 (h1) receives slowly",
    ]  # fmt: skip


def test_one_card_of_a_node_is_named_by_its_rank() -> None:
    verdict = judge(found(4, 4, lambda a, b: 2e9 if a == 6 and b // 4 != 1 else usual(a, b)), ASSUMED)
    assert [str(one).split(":")[0] for one in verdict.slow] == ["rank 6 (GPU 2 of node 1, h1) sends slowly"]


def test_a_single_cable_is_named_by_both_ends() -> None:
    verdict = judge(found(4, 1, lambda a, b: 1e9 if (a, b) == (0, 2) else 20e9), ASSUMED)
    assert [str(one).split(":")[0] for one in verdict.slow] == [
        "the link from node 0 (h0) to node 2 (h2) is slow"
    ]


def test_links_that_are_all_below_the_plan_are_told() -> None:
    text = as_text(judge(found(2, 4, lambda a, b: usual(a, b) / 10), ASSUMED))
    assert "! between nodes the links reach 10% of what the plan assumes" in text and "slowly" not in text


def test_pairs_meet_once_and_never_twice_in_a_round() -> None:
    pytest.importorskip("torch")
    from shardwise.training.links import tournament

    for players in (1, 2, 3, 4, 7, 8):
        rounds = tournament(players)
        pairs = [pair for one in rounds for pair in one]
        assert len(pairs) == len(set(pairs)) == players * (players - 1) // 2
        for one in rounds:
            names = [name for pair in one for name in pair]
            assert len(names) == len(set(names))
    assert {n for one in tournament(40, 15) for pair in one for n in pair} == set(range(40))


def test_a_node_takes_its_place_from_the_scheduler_or_from_the_person(monkeypatch) -> None:
    nothing: dict = {"nodes": None, "node": None, "head": None, "port": None}
    pet = {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "pod-0"}
    assert where_am_i(pet, nothing, 8) == Where(2, 1, 8, "pod-0", 29401)
    sky = {"SKYPILOT_NODE_RANK": "0", "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2"}
    assert where_am_i(sky, nothing, 1) == Where(2, 0, 1, "10.0.0.1", 29401)
    monkeypatch.setattr(preflight, "_first_host", lambda names, environment: "n1")
    slurm = {"SLURM_NODEID": "1", "SLURM_STEP_NUM_NODES": "4", "SLURM_JOB_ID": "7"}
    assert where_am_i(slurm, nothing, 4) == Where(4, 1, 4, "n1", 40007)
    assert where_am_i({}, {**nothing, "nodes": 2, "node": 1, "head": "a"}, 1) == Where(2, 1, 1, "a", 29401)
    with pytest.raises(UsageError, match="its number"):
        where_am_i({}, {**nothing, "nodes": 2}, 1)
    with pytest.raises(UsageError, match="first node"):
        where_am_i({}, {**nothing, "nodes": 2, "node": 0}, 1)


def test_ranks_of_a_run_meet_where_its_launcher_says() -> None:
    from shardwise.launch.wrapper import rendezvous

    assert rendezvous(["torchrun", "--rdzv-endpoint=head.local:20007", "-m", "x"], {}) == (
        "head.local",
        20007,
    )
    assert rendezvous(["torchrun"], {"PET_MASTER_ADDR": "pod-0.x", "PET_MASTER_PORT": "29400"}) == (
        "pod-0.x",
        29400,
    )


def doctor(*arguments: object, prefix: tuple[str, ...] = (), **environment: str) -> "subprocess.Popen[str]":
    import os

    return subprocess.Popen(
        [*prefix, sys.executable, "-m", "shardwise.cli.main", "doctor", *map(str, arguments)],
        text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, **environment},
    )  # fmt: skip


@pytest.mark.skipif(bool(networks.missing()), reason=f"no slow link can be made: {networks.missing()}")
def test_the_one_slow_node_of_three_is_named(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    with networks.hosts(3) as machines:
        machines[1].limit("200mbit")
        nodes = [
            doctor(
                "--nodes", 3, "--node-rank", n, "--head", machines[0].address, "--interface", "eth0", "--json",
                prefix=tuple(machine.run),
            )
            for n, machine in enumerate(machines)
        ]  # fmt: skip
        said = [node.communicate(timeout=120) for node in nodes]
    assert [node.returncode for node in nodes] == [1, 0, 0], said
    report = json.loads(said[0][0])
    assert [one.split(" (")[0] for one in report["slow"]] == ["node 1"] and "sends slowly" in report["slow"][
        0
    ]
    (level,) = report["levels"]
    assert level["name"] == "between nodes" and level["assumed"] > 0
    assert report["ranks"] == 3 and report["all_reduce_seconds"] > 0.1  # 16 MiB twice through 25 MB/s


def test_a_node_that_does_not_come_is_named(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from shardwise.launch.ports import choose_port

    node = doctor(
        "--nodes", 2, "--node-rank", 0, "--head", "127.0.0.1", "--port", choose_port(None), "--interface", "lo",
        SHARDWISE_MEET_SECONDS="3",
    )  # fmt: skip
    _, said = node.communicate(timeout=60)
    assert node.returncode == 1 and "rank(s) 1 of 2 have not appeared" in said, said


def test_a_run_on_this_machine_measures_its_ranks_first(
    tmp_path: Path, tiny_model: Path, chat_file: Path, shardwise
) -> None:
    pytest.importorskip("torch")
    from uninterrupted import STEPS, losses, recipe

    from shardwise.runs import RunFolder

    text = recipe(tiny_model, chat_file, 0, "{preflight: true}", processes="2")
    (tmp_path / "r.yaml").write_text(text.replace(f"max_steps: {STEPS}", "max_steps: 2"))
    done = shardwise("launch", "r.yaml", "--on", "local", "--name", "here", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "preflight: 2 ranks on 1 node, all answer" in done.stderr
    assert len(losses(RunFolder(tmp_path / "runs" / "here"))) == 2
