"""A rank that waits while its run is decided: it becomes the run's, or nothing is left of it."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from shardwise.errors import ShardwiseError
from shardwise.facts.machine import detect_machine
from shardwise.launch import start
from shardwise.launch.ahead import RANK, SPINS, Ahead, rank_environment
from shardwise.launch.precision import to_be_measured
from shardwise.recipe import Recipe, parse_recipe

ONE = "model: m\ndata: rows.jsonl\ntraining: {precision: fp32}\nengine: {name: single, device: cpu}\n"
RECIPE = """
model: {model}
data: {{train: {data}, validation: 4, sequence_length: 64}}
method: lora
training: {{max_steps: 2, global_batch_size: 2, micro_batch_size: 1, precision: fp32}}
engine: {{device: cpu}}
evaluation: {{every_steps: 0}}
run: {{name: one, folder: {runs}}}
"""


def waiting() -> list[int]:
    """Ranks that this process has started."""
    return [c.pid for c in psutil.Process().children(recursive=True) if "--wait" in words_of(c)]


def words_of(process: psutil.Process) -> list[str]:
    """Its command; none if it has ended. For a moment after a program was started the system tells no words of it."""
    words: list[str] = []
    while not words and not gone(process.pid):
        try:
            words = process.cmdline()
        except psutil.NoSuchProcess:
            break
    return words


def gone(pid: int) -> bool:
    """Ended, even if nobody has asked how."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_the_rank_that_waited_is_the_one_that_trains(
    tiny_model: Path, chat_file: Path, tmp_path: Path
) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE.format(model=tiny_model, data=chat_file, runs=tmp_path / "runs"))
    command = [sys.executable, "-m", "shardwise.cli.main", "train", str(recipe)]
    with (tmp_path / "said").open("w") as said:
        process = subprocess.Popen(command, stdout=said, stderr=said)
    ranks, rank = set(), [str(word) for word in RANK[1:]]
    while process.poll() is None:
        for child in psutil.Process(process.pid).children(recursive=True):
            words = words_of(child)
            if words[1 : 1 + len(rank)] == rank:
                ranks.add((child.pid, words[-1]))
        time.sleep(0.05)
    assert process.returncode == 0, (tmp_path / "said").read_text()
    assert [how for _, how in ranks] == ["--wait"], "one process, from the first import to the last save"
    assert "step 2/2" in (tmp_path / "runs/one/logs/rank-0.log").read_text()


def test_nothing_waits_when_the_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ShardwiseError), Ahead(parse_recipe(ONE)):
        (rank,) = waiting()
        raise ShardwiseError("refused", "for a reason", "a hint")
    assert gone(rank)


def test_it_ends_when_its_launcher_is_killed() -> None:
    code = (
        "import os, signal, sys\nfrom shardwise.launch.ahead import Ahead\n"
        "from shardwise.recipe import parse_recipe\n"
        "ahead = Ahead(parse_recipe(sys.argv[1]))\nprint(ahead._waiting[0].pid)\nsys.stdout.flush()\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", code, ONE], capture_output=True, text=True)
    end = time.monotonic() + 20
    while not gone(int(done.stdout)) and time.monotonic() < end:
        time.sleep(0.05)
    assert gone(int(done.stdout))


def test_why_it_cannot_import_is_told_as_of_any_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('this torch is broken')\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    with Ahead(parse_recipe(ONE)) as ahead:
        outcome = start([*RANK, str(tmp_path / "run")], 1, tmp_path / "logs", ahead=ahead)
    assert outcome.exit_code == 1 and outcome.failure is not None
    assert "this torch is broken" in outcome.failure.reason
    assert "this torch is broken" in (tmp_path / "logs/rank-0.log").read_text()


def test_it_is_told_once(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("no recipe")
    with Ahead(parse_recipe(ONE)) as ahead:
        (rank,) = waiting()
        outcome = start([*RANK, str(tmp_path)], 1, tmp_path / "logs", ahead=ahead)
        assert gone(rank) and ahead.take([*RANK], {}, tmp_path / "log") is None
    assert outcome.exit_code == 2
    assert "recipe.yaml" in (tmp_path / "logs/rank-0.log").read_text()


def test_it_works_in_the_environment_that_it_is_told(tmp_path: Path) -> None:
    told = json.dumps({"arguments": [str(tmp_path)], "environment": {"RANK": "the last"}})
    done = subprocess.run([*RANK, "--wait"], input=told + "\n", capture_output=True, text=True)
    assert done.returncode == 1 and "invalid literal for int() with base 10: 'the last'" in done.stderr


@pytest.mark.parametrize(
    "changed",
    [
        "engine: {name: deepspeed, device: cpu}",
        "engine: {name: fsdp2, device: cpu}",
        "engine: {device: cpu, processes: 2}",
    ],
)
def test_it_is_not_started_where_it_could_not_be_the_rank(changed: str) -> None:
    kept = [line for line in ONE.splitlines() if not line.startswith("engine")]
    with Ahead(parse_recipe("\n".join([*kept, changed, ""]))):
        assert waiting() == []


def test_it_does_not_disturb_a_measurement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path))
    recipe: Recipe = parse_recipe(ONE.replace("fp32", "auto"))
    assert to_be_measured(recipe, detect_machine())
    with Ahead(recipe):
        assert waiting() == []


def test_threads_do_not_keep_a_core_from_each_other_for_long() -> None:
    assert rank_environment({})["GOMP_SPINCOUNT"] == SPINS
    assert rank_environment({"GOMP_SPINCOUNT": "7"})["GOMP_SPINCOUNT"] == "7"
    assert "GOMP_SPINCOUNT" not in rank_environment({"OMP_WAIT_POLICY": "active"})


def test_every_rank_gets_it(tmp_path: Path) -> None:
    code = "import os; print(os.environ['GOMP_SPINCOUNT'])"
    start([sys.executable, "-S", "-c", code], 2, tmp_path, {"RANK": "9"})
    assert [(tmp_path / f"rank-{n}.log").read_text().strip() for n in (0, 1)] == [SPINS, SPINS]
