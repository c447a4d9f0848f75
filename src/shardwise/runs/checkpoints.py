"""Checkpoints as files: published by one rename, verified by checksum, kept by step. No tensors here.

    checkpoints/step-00000100/
      rank-0.safetensors ...  pieces of tensors, each rank its own file
      index.json              which piece of which tensor lies where
      state.json              the step, and everything that made it: recipe, data, versions, layout
      manifest.json           size and SHA-256 of each file above
      complete                SHA-256 of manifest.json; written last

Nothing in it is a pickle: reading one made by somebody else can fail, but it cannot run code. A folder that
is still being written is called step-00000100.writing, a damaged one is set aside as step-00000100.damaged.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.errors import CheckpointError
from shardwise.runs.folder import COMPLETE, CheckpointFolder, RunFolder
from shardwise.runs.jsonfile import read_json

MANIFEST, INDEX, STATE = "manifest.json", "index.json", "state.json"
WRITING, DAMAGED = ".writing", ".damaged"


@dataclass(frozen=True)
class Skipped:
    """A checkpoint that cannot be used, and why; the reason names the file."""

    path: Path
    reason: str


@dataclass(frozen=True)
class Choice:
    """The newest checkpoint whose every byte is as it was written, and the newer ones passed over."""

    checkpoint: CheckpointFolder | None
    skipped: tuple[Skipped, ...]


def sha256(path: Path) -> str:
    """Hex digest of a file's content; about 1.8 GB/s on one core with SHA instructions."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def publish(work: Path, final: Path, digests: Mapping[str, str]) -> None:
    """Make the folder `work` the checkpoint `final`: manifest, marker, rename, each on disk before the next.

    `digests` holds the SHA-256 of files that ranks have hashed already; the rest is hashed here. A good
    checkpoint that is there already is left as it is, a damaged one is set aside. Raises OSError.
    """
    files = sorted(p for p in work.iterdir() if p.is_file())
    entries = {p.name: {"bytes": p.stat().st_size, "sha256": digests.get(p.name) or sha256(p)} for p in files}
    text = json.dumps({"files": entries}, indent=1)
    (work / MANIFEST).write_text(text)
    for path in (*files, work / MANIFEST, work):
        flush(path)
    (work / COMPLETE).write_text(hashlib.sha256(text.encode()).hexdigest() + "\n")
    flush(work / COMPLETE)
    flush(work)
    if final.exists():
        if not verify(final):
            shutil.rmtree(work)
            return
        set_aside(final)
    work.rename(final)
    flush(final.parent)


def verify(folder: Path) -> str | None:
    """What is wrong with a checkpoint, naming the file; None when every byte is as it was written."""
    try:
        text = (folder / MANIFEST).read_text()
        marker = (folder / COMPLETE).read_text().strip()
    except FileNotFoundError as problem:
        return f"{Path(problem.filename).name} is missing"
    except (OSError, UnicodeDecodeError) as problem:
        return f"its {MANIFEST} or its marker cannot be read ({type(problem).__name__})"
    if hashlib.sha256(text.encode()).hexdigest() != marker:
        return f"{MANIFEST} is not the one that was written"
    found = read_json(folder / MANIFEST) or {}
    files: dict[str, dict[str, Any]] = found.get("files", {})
    missing = {INDEX, STATE} - files.keys()
    if missing:
        return f"{MANIFEST} does not list {', '.join(sorted(missing))}"
    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        problems = [p for p in pool.map(lambda name: _check(folder, name, files[name]), files) if p]
    return problems[0] if problems else None


def _check(folder: Path, name: str, entry: Mapping[str, Any]) -> str | None:
    path = folder / name
    if Path(name).name != name:
        return f"{MANIFEST} names a file outside the folder: {name!r}"
    try:
        size = path.stat().st_size
        if size != entry["bytes"]:
            return f"{name} has {size:,} bytes, {entry['bytes']:,} were written"
        if sha256(path) != entry["sha256"]:
            return f"the content of {name} is not what was written (SHA-256 differs)"
    except FileNotFoundError:
        return f"{name} is missing"
    except OSError as problem:
        return f"{name} cannot be read: {problem.strerror}"
    return None


def choose(run: RunFolder, step: int | None = None) -> Choice:
    """The newest good checkpoint (or that of `step`), every file verified, and the newer ones with reasons."""
    skipped = [
        Skipped(p, "it was still being written when the run ended")
        for p in sorted(run.checkpoints_path.glob(f"step-*{WRITING}"), reverse=True)
    ]
    folders = [p for p in run.checkpoints_path.glob("step-*") if p.name.removeprefix("step-").isdigit()]
    for path in sorted(folders, key=_step_of, reverse=True):
        if step is not None and _step_of(path) != step:
            continue
        problem = verify(path)
        if problem is None:
            newer = [s for s in skipped if _step_of(s.path) >= _step_of(path)]
            return Choice(CheckpointFolder(_step_of(path), path), tuple(newer))
        skipped.append(Skipped(path, problem))
    return Choice(None, tuple(skipped))


def chosen(run: RunFolder, step: int | None = None) -> tuple[CheckpointFolder, tuple[Skipped, ...]]:
    """As `choose`. Raises CheckpointError, naming each damaged file, when no checkpoint is good."""
    choice = choose(run, step)
    if choice.checkpoint is None:
        reasons = "; ".join(f"{s.path.name}: {s.reason}" for s in choice.skipped)
        wanted = f"of step {step} " if step is not None else ""
        raise CheckpointError(
            f"{run.path} has no complete checkpoint {wanted}to go on from",
            reasons or "none was written",
            "start the recipe anew",
        )
    return choice.checkpoint, choice.skipped


def facts_of(folder: Path) -> dict[str, Any]:
    """state.json: the step and what made it. Empty when it cannot be read."""
    return read_json(folder / STATE) or {}


def best(run: RunFolder) -> CheckpointFolder | None:
    """The checkpoint with the lowest held-out loss of those that were evaluated at their own step."""
    scored = [
        (loss, c.step, c)
        for c in run.checkpoints()
        if isinstance(loss := facts_of(c.path).get("evaluation_loss"), float)
    ]
    return min(scored, key=lambda s: s[:2])[2] if scored else None


def prune(run: RunFolder, keep: int) -> list[int]:
    """Delete all but the `keep` latest by step and the best one. Returns the steps that were removed.

    What an interrupted save left behind goes too, and damaged ones that are older than the latest.
    """
    found = run.checkpoints()
    top = best(run)
    spared = {c.step for c in found[-max(1, keep) :]} | ({top.step} if top else set())
    removed = []
    for old in found:
        if old.step not in spared:
            _remove(old.path)
            removed.append(old.step)
    latest = found[-1].step if found else -1
    for path in run.checkpoints_path.glob("step-*"):
        if path.suffix == WRITING or (path.suffix == DAMAGED and _step_of(path) <= latest):
            shutil.rmtree(path, ignore_errors=True)
    return removed


def pass_over(skipped: Sequence[Skipped], where: str) -> list[str]:
    """What to say of checkpoints that are not used, going on `where`; damaged ones are set aside."""
    for one in skipped:
        if one.path.name.removeprefix("step-").isdigit():
            set_aside(one.path)
    return [f"{one.path.name} is not used: {one.reason}; going on {where}" for one in skipped]


def set_aside(path: Path) -> Path:
    """Rename a damaged checkpoint out of the way; it is not deleted before a newer good one exists."""
    target = path.with_name(path.name + DAMAGED)
    if target.exists():
        shutil.rmtree(target, ignore_errors=True)
    path.rename(target)
    return target


def flush(path: Path) -> None:
    """Onto the disk: a file's content, or a folder's names."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _remove(path: Path) -> None:
    """The marker goes first: a deletion that is interrupted leaves no checkpoint that looks whole."""
    with suppress(OSError):
        (path / COMPLETE).unlink()
    shutil.rmtree(path, ignore_errors=True)


def _step_of(path: Path) -> int:
    number = path.name.removeprefix("step-").split(".")[0]
    return int(number) if number.isdigit() else -1
