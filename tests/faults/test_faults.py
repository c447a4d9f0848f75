"""Each fault is really caused, in real runs of two ranks started by the command a person types."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from shardwise.runs import RunFolder
from shardwise.runs.checkpoints import choose, facts_of, verify
from shardwise.runs.records import Resume, Step, Warned

INJECT = Path(__file__).parent / "inject"


@dataclass(frozen=True)
class Ended:
    run: RunFolder
    code: int
    text: str
    seconds: float

    @property
    def losses(self) -> list[float]:
        return [step.loss for step in self.run.history(Step)]

    def weights(self) -> dict[str, Any]:
        return load_file(self.run.model_path / "model.safetensors")


Train = Callable[..., Ended]


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, chat_file: Path) -> Train:
    root = tmp_path_factory.mktemp("faults")

    def go(
        name: str, fault: str = "", resume: bool = False, settings: tuple[str, ...] = (), **env: str
    ) -> Ended:
        recipe = root / "recipe.yaml"
        recipe.write_text(
            f"model: {tiny_model}\n"
            f"data: {{train: {chat_file}, validation: 4, sequence_length: 64}}\n"
            "method: full\n"
            "optimizer: {learning_rate: 1e-3}\n"
            "training: {max_steps: 12, global_batch_size: 4, micro_batch_size: 1, precision: fp32}\n"
            "engine: {name: fsdp2, device: cpu, processes: 2}\n"
            "evaluation: {every_steps: 0}\n"
            "checkpoint: {every_steps: 4, keep: 2, hang_seconds: 3}\n"
            f"run: {{folder: {root / 'runs'}}}\n"
        )
        run = RunFolder(root / "runs" / name)
        what = ["--resume", run.path] if resume else [recipe, "--set", f"run.name={name}"]
        for setting in settings:
            what += ["--set" if "=" in setting else "--accept", setting]
        began = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-m", "shardwise.cli.main", "train", *map(str, what)],
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
            env={
                **os.environ,
                "PYTHONPATH": str(INJECT),
                "FAULT": fault,
                "FAULT_MARKER": str(root / f"{name}.struck"),
                "OMP_NUM_THREADS": "1",
                **env,
            },
        )
        return Ended(run, done.returncode, done.stdout + done.stderr, time.monotonic() - began)

    return go


@pytest.fixture(scope="module")
def undisturbed(train: Train) -> Ended:
    ended = train("undisturbed")
    assert ended.code == 0, ended.text[-2000:]
    return ended


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a.keys() == b.keys() and all((a[key] == b[key]).all() for key in a)


def test_kill_9_of_a_rank_goes_on_by_itself_to_the_very_same_weights(
    train: Train, undisturbed: Ended
) -> None:
    ended = train("killed", "kill:1:7")
    assert ended.code == 0, ended.text[-2000:]
    assert [e.step for e in ended.run.events() if isinstance(e, Resume)] == [4]
    assert any("killed by SIGKILL" in e.message for e in ended.run.events() if isinstance(e, Warned))
    assert ended.losses == undisturbed.losses
    assert same(ended.weights(), undisturbed.weights())


def test_kill_9_of_a_rank_under_zero_3(train: Train, undisturbed: Ended) -> None:
    """Bitwise is shown by `test_resume.py`; here against FSDP2, so that one run is enough."""
    pytest.importorskip("deepspeed")
    ended = train("zero3", "kill:0:7", settings=("engine.name=deepspeed", "engine.deepspeed.zero_stage=3"))
    assert ended.code == 0, ended.text[-2000:]
    assert [e.step for e in ended.run.events() if isinstance(e, Resume)] == [4]
    apart = max(abs(a - b) / b for a, b in zip(ended.losses, undisturbed.losses, strict=True))
    assert len(ended.losses) == 12 and apart < 1e-5


def test_sigterm_to_one_rank_saves_one_step_on_all_and_another_engine_goes_on(
    train: Train, undisturbed: Ended
) -> None:
    ended = train("stopped", "term:1:6")
    assert ended.code == 75, ended.text[-2000:]
    status = ended.run.read_status()
    assert (status.state, status.exit_code) == ("interrupted", 75) and status.reason
    assert [c.step for c in ended.run.checkpoints()] == [4, 6]
    newest = ended.run.checkpoints()[-1].path
    assert verify(newest) is None and facts_of(newest)["world_size"] == 2
    assert [step.step for step in ended.run.history(Step)][-1] == 6  # 0 steps lost

    # the newest is damaged meanwhile: named, and the one before is used; under another engine on one rank
    (newest / "rank-1.safetensors").write_bytes(b"")
    settings = ("engine.name=single", "engine.processes=1")
    again = train("stopped", resume=True, settings=settings)
    assert again.code == 0, again.text[-2000:]
    assert "step-00000006 is not used: rank-1.safetensors has 0 bytes" in again.text
    assert "engine.name was fsdp2, is single" in again.text
    apart = max(abs(a - b) / b for a, b in zip(again.losses, undisturbed.losses, strict=True))
    assert len(again.losses) == 12 and apart < 1e-5


def test_a_stopped_rank_is_found_with_every_ranks_stack(train: Train) -> None:
    ended = train("frozen", "freeze:1:6", settings=("checkpoint.restarts=0",))
    assert ended.code == 1
    assert re.search(
        r"rank 1 is stopped \(SIGSTOP\): no sign of life for [\d.]+ s since step 6, backward", ended.text
    )
    silence = float(re.findall(r"no sign of life for ([\d.]+) s", ended.text)[0])
    assert silence < 10
    assert "--- rank 0" in ended.text and "--- rank 1 (stuck)" in ended.text
    assert ended.text.count("loop.py") >= 2
    assert ended.run.read_status().state == "failed"


def test_a_loss_that_is_not_finite_stops_before_the_update_naming_rank_and_rows(train: Train) -> None:
    # 9 bins an epoch in steps of 4, 4 and 1: rank 1 makes 5 forwards in 3 steps, the 11th in step 7
    ended = train("diverged", "nan:1:0", settings=("engine.name=ddp",), FAULT_NAN_CALL="11")
    assert ended.code == 1
    assert re.search(r"step 7: loss is nan \(rank 1, rows \S*chat\.jsonl:\d+", ended.text), ended.text[-2000:]
    newest = choose(ended.run).checkpoint
    assert (
        newest is not None and newest.step == 4
    )  # and what was saved is finite: save() looks at every tensor
    assert ended.losses and all(loss == loss for loss in ended.losses)
    assert not ended.run.model_path.exists()


def test_c12_what_changed_is_refused_by_name_and_accepted_by_name(train: Train, undisturbed: Ended) -> None:
    """Refusals come from the launcher: nothing is started, and the run is as it was."""
    status = undisturbed.run.status_path.read_text()

    refused = train("undisturbed", resume=True, settings=("optimizer.learning_rate=0.0005",))
    assert refused.code == 2
    assert "optimizer.learning_rate was 0.001, is 0.0005" in refused.text
    assert "--accept optimizer.learning_rate" in refused.text

    hopeless = train("undisturbed", resume=True, settings=("training.global_batch_size=2",))
    assert hopeless.code == 2
    assert "training.global_batch_size was 4, is 2" in hopeless.text
    assert undisturbed.run.status_path.read_text() == status
    state = undisturbed.run.checkpoints()[-1].path / "state.json"
    assert json.loads(state.read_text())["versions"]["torch"]
