"""Room and permission are looked at before anything is loaded (case C03)."""

import os
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from shardwise.errors import UsageError
from shardwise.launch import space as module
from shardwise.launch.space import require_space, require_writable
from shardwise.plan.saving import checkpoint_bytes


@pytest.fixture
def job(tiny_model: Path, chat_file: Path) -> Any:
    from shardwise.launch.job import decide
    from shardwise.recipe import parse_recipe

    text = (
        f"model: {tiny_model}\ndata: {{train: {chat_file}, validation: 0, sequence_length: 64}}\nmethod: full\n"
        "training: {max_steps: 12, global_batch_size: 4, micro_batch_size: 1, precision: fp32}\n"
        "engine: {name: single, device: cpu, processes: 1}\ncheckpoint: {every_steps: 2, keep: 3}\n"
    )
    return decide(parse_recipe(text))


def test_c03_too_little_room_is_refused_with_both_numbers(
    job: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    each = checkpoint_bytes(job.shape, job.plan.stack)
    assert each == 28_832 * 12  # fp32 weights 4, AdamW 8
    needed = 5 * each + 4 * 28_832  # 3 kept, the best, one being written; and the result
    for free, fits in ((needed, True), (needed - 1, False)):
        monkeypatch.setattr(module.shutil, "disk_usage", lambda _, free=free: type("U", (), {"free": free})())
        if fits:
            require_space(job, tmp_path)
            continue
        with pytest.raises(UsageError, match=r"needs 1\.76 MiB.* 1\.76 MiB are free|needs .* are free"):
            require_space(job, tmp_path)


def test_a_folder_that_cannot_be_written_is_refused_at_once(tmp_path: Path) -> None:
    """Really read-only: mounted so, since root writes where permissions say no."""
    folder = tmp_path / "readonly"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "ro,size=1m", "tmpfs", str(folder)]
    if os.geteuid() == 0 and subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("file systems can only be mounted by root, outside of most containers")
    folder.chmod(0o555) if os.geteuid() else None
    began = time.monotonic()
    try:
        with pytest.raises(UsageError, match="nothing can be written"):
            require_writable(folder / "runs" / "deep")
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=False, capture_output=True)
    assert time.monotonic() - began < 5
    assert not list(folder.iterdir())
