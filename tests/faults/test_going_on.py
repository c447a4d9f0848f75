"""A run that goes on after something has changed: told, refused by name, accepted by name; damage is found."""

import json
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from faulty import PATIENCE, Ended, Train, record

from shardwise.runs import RunFolder
from shardwise.runs.checkpoints import choose, facts_of, verify
from shardwise.runs.records import Step


def test_after_sigterm_to_one_rank_another_engine_goes_on_from_what_is_whole(train: Train) -> None:
    ended = train("stopped", "term:1:6", engine="fsdp2")
    assert ended.code == 75, ended.text[-2000:]
    assert [c.step for c in ended.run.checkpoints()] == [4, 6]
    newest = ended.run.checkpoints()[-1].path
    assert verify(newest) is None and facts_of(newest)["world_size"] == 2

    # the newest is damaged meanwhile: named, and the one before is used; under another engine on one rank
    (newest / "rank-1.safetensors").write_bytes(b"")
    settings = ("engine.name=single", "engine.processes=1")
    again = train("stopped", resume=True, settings=settings)
    assert again.code == 0, again.text[-2000:]
    assert "step-00000006 is not used: rank-1.safetensors has 0 bytes" in again.text
    assert "engine.name was fsdp2, is single" in again.text
    assert [s.step for s in again.run.history(Step)] == list(range(1, 13))


def test_a_hundred_damages_to_a_real_checkpoint_are_found_and_the_one_before_is_used(
    undisturbed: Ended, engine: str, tmp_path: Path
) -> None:
    """Bit flips, truncations, deletions and swaps of shard files, each named; nothing has been loaded then."""
    run = RunFolder(tmp_path / "run")
    shutil.copytree(undisturbed.run.checkpoints_path, run.checkpoints_path)
    before, newest = (c.path for c in run.checkpoints()[-2:])
    kept = shutil.copytree(newest, tmp_path / "kept")
    found = dict.fromkeys(("flip", "truncate", "delete", "swap"), 0)
    for number in range(100):
        kind = list(found)[number % 4]
        name = damage(newest, kind, random.Random(number))
        choice = choose(run)
        assert choice.checkpoint is not None and choice.checkpoint.path == before, (number, kind, name)
        # manifest and marker vouch for each other: either may be the one that is named
        named = {"complete": ("complete", "manifest"), "manifest.json": ("manifest",)}.get(name, (name,))
        assert any(n in choice.skipped[0].reason for n in named), (number, kind, name, choice.skipped)
        found[kind] += 1
        shutil.rmtree(newest)
        shutil.copytree(kept, newest)
    assert verify(newest) is None
    record(f"damages-{engine}", {"found": found, "of": 100})


def damage(folder: Path, kind: str, draw: random.Random) -> str:
    """Harm one file. Returns its name (of swapped ones, what both begin with)."""
    if kind == "swap":
        a, b = folder / "rank-0.safetensors", folder / "rank-1.safetensors"
        a.rename(folder / "x")
        b.rename(a)
        (folder / "x").rename(b)
        return "rank-"
    path = draw.choice(sorted(folder.iterdir()))
    data = bytearray(path.read_bytes())
    if kind == "flip":
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    if kind == "truncate":
        del data[draw.randrange(len(data)) :]
    if kind == "delete":
        path.unlink()
    else:
        path.write_bytes(data)
    return path.name


def test_c12_what_changed_is_refused_by_name_and_accepted_by_name(
    train: Train, undisturbed: Ended, engine: str, chat_file: Path, tmp_path: Path
) -> None:
    """Recipe field, data and version. Refusals come from the launcher: nothing is started or changed."""
    if engine == "zero3":
        pytest.skip("the launcher compares; engines have no part in it")
    run = RunFolder(Path(shutil.copytree(undisturbed.run.path, train.runs / "changed")))
    (run.path / "lock").unlink(missing_ok=True)
    status = run.status_path.read_text()

    hopeless = train("changed", resume=True, settings=("training.global_batch_size=2",))
    assert hopeless.code == 2
    assert "training.global_batch_size was 4, is 2" in hopeless.text

    # the rows are others under the same name, a library is another version, the learning rate is halved
    rows = chat_file.read_text().splitlines(keepends=True)
    other = tmp_path / "other.jsonl"
    other.write_text("".join([*rows[1:], rows[0].replace("quick", "slow")]))
    newest = run.checkpoints()[-1].path
    made_by = json.loads((newest / "state.json").read_text())
    assert made_by["versions"]["torch"]
    rewrite(newest, {**made_by, "versions": {**made_by["versions"], "torch": "2.12.9"}})
    settings = ["optimizer.learning_rate=0.0005", f"data.train={other}", "training.max_steps=14"]
    refused = train("changed", resume=True, settings=settings)
    assert refused.code == 2
    fields = ["data.rows", "optimizer.learning_rate", "training.max_steps", "versions.torch"]
    for field in fields:
        assert f"{field} was " in refused.text and f"--accept {field}" in refused.text
    assert "optimizer.learning_rate was 0.001, is 0.0005" in refused.text
    assert "versions.torch was 2.12.9, is " in refused.text
    missing = train("changed", resume=True, settings=[*settings, *fields[:-2], "data.held_out"])
    assert missing.code == 2 and "--accept versions.torch" in missing.text  # one override for each field
    assert "--accept data.rows" not in missing.text
    assert run.status_path.read_text() == status

    accepted = train("changed", resume=True, settings=[*settings, *fields, "data.held_out"])
    assert accepted.code == 0, accepted.text[-2000:]
    log = [e.model_dump()["message"] for e in run.events("warning")]
    for field in fields:
        assert any(field in m and m.endswith("(accepted)") for m in log), (field, log)
    assert [s.step for s in run.history(Step)] == list(range(1, 15))
    assert "learning_rate: 0.0005" in run.recipe_text()


def test_c12_under_torchrun_changes_are_refused_and_accepted_by_name_too(
    train: Train, undisturbed: Ended, engine: str
) -> None:
    """Where a scheduler starts the ranks, --accept comes with the wrapper or in SHARDWISE_ACCEPT."""
    if engine == "zero3":
        pytest.skip("rank 0 compares; engines have no part in it")
    run = RunFolder(Path(shutil.copytree(undisturbed.run.path, train.runs / "torchrun")))
    shutil.rmtree(run.model_path)
    run.status("interrupted", "stopped on request", 75)
    text = run.recipe_text()
    recipe = train.root / "torchrun.yaml"
    recipe.write_text(
        text.replace("learning_rate: 0.001", "learning_rate: 0.0005").replace(
            "max_steps: 12", "max_steps: 13"
        )
    )

    def start(*more: str) -> "subprocess.CompletedProcess[str]":
        command = [
            sys.executable,
            "-m",
            "shardwise.launch.wrapper",
            "--recipe",
            str(recipe),
            "--name",
            run.name,
        ]
        command += ["--owner", "me", "--attempt", "1", *more, "--", "torchrun", "--standalone"]
        command += ["--nproc-per-node=2", "-m", "shardwise.launch.rank", str(run.path)]
        return subprocess.run(command, capture_output=True, text=True, timeout=200 * PATIENCE, check=False)

    refused = start("--accept", "training.max_steps")
    assert refused.returncode == 2, refused.stderr[-2000:]
    assert "optimizer.learning_rate was 0.001, is 0.0005" in refused.stderr
    assert run.recipe_text() == text and run.read_status().state == "interrupted"
    done = start("--accept", "training.max_steps", "--accept", "optimizer.learning_rate")
    assert done.returncode == 0, done.stderr[-2000:]
    log = [e.model_dump()["message"] for e in run.events("warning")]
    assert "since step 12 optimizer.learning_rate was 0.001, is 0.0005 (accepted)" in log
    assert [s.step for s in run.history(Step)] == list(range(1, 14))


def rewrite(checkpoint: Path, state: dict[str, object]) -> None:
    """A checkpoint as another version would have written it."""
    from shardwise.runs.checkpoints import publish

    (checkpoint / "state.json").write_text(json.dumps(state))
    for name in ("manifest.json", "complete"):
        (checkpoint / name).unlink()
    work = checkpoint.rename(checkpoint.with_name(checkpoint.name + ".writing"))
    publish(work, checkpoint, {})
