"""A plan that does not fit is not started; the run's events reach a tracker when asked."""

from dataclasses import replace
from pathlib import Path

import pytest


def test_a_run_that_cannot_fit_is_refused_before_it_starts(
    tmp_path: Path, tiny_model: Path, chat_file: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    """The real plan of a real recipe, on a machine with a kilobyte of memory."""
    from shardwise.cli.main import main
    from shardwise.launch import job as launch

    def decide(recipe, progress=None):
        decided = real(recipe, progress)
        return replace(decided, plan=replace(decided.plan, capacity_bytes=1024))

    real = launch.decide
    monkeypatch.setattr(launch, "decide", decide)
    monkeypatch.chdir(tmp_path)
    more = "method: full\ntraining: {max_steps: 1, global_batch_size: 2, micro_batch_size: 2}\n"
    (tmp_path / "recipe.yaml").write_text(f"model: {tiny_model}\ndata: {chat_file}\n{more}")
    with pytest.raises(SystemExit) as end:
        main(["train", "recipe.yaml"])
    assert end.value.code == 2
    said = capsys.readouterr().err
    assert "does not fit" in said and "micro_batch_size=1" in said and "method=lora" in said
    assert [p.name for p in tmp_path.iterdir()] == ["recipe.yaml"]


def test_an_unknown_tracker_is_refused(tmp_path: Path, tiny_model: Path, chat_file, shardwise) -> None:
    (tmp_path / "recipe.yaml").write_text(
        f"model: {tiny_model}\ndata: {chat_file}\nrun: {{tracking: [tensorbord]}}\n"
    )
    done = shardwise("train", "recipe.yaml", cwd=tmp_path)
    assert done.returncode == 2
    assert "run.tracking" in done.stderr
