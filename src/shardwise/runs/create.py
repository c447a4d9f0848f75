"""A new run folder: its name is claimed, its recipe and plan are written, its lock is taken."""

import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from shardwise.errors import UsageError
from shardwise.runs import lock
from shardwise.runs.folder import LATEST, RunFolder
from shardwise.runs.jsonfile import write_json, write_text


def create_run(
    folder: str | Path,
    name: str | None,
    recipe_yaml: str,
    plan: Mapping[str, Any],
    default_name: str = "run",
) -> RunFolder:
    """Make `folder`/NAME, write recipe and plan, and take its lock. Status is `running` from here on.

    NAME is `name` as it stands, or `default_name` with date and time. Raises UsageError when the name is no
    folder name, when it is taken (naming the process at work there), or when nothing can be written there.
    """
    folder = Path(folder)
    check_name(name or default_name)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        run = RunFolder(_claim(folder, name, default_name))
    except OSError as problem:
        raise UsageError(
            f"no run folder can be made in '{folder}'",
            problem.strerror or str(problem),
            "choose another place with --set run.folder=PATH",
        ) from None
    try:
        run.acquire()
        write_text(run.recipe_path, recipe_yaml)
        write_json(run.plan_path, dict(plan))
        run.status("running")
    except OSError as problem:
        run.discard()
        raise UsageError(
            f"run folder '{run.path}' cannot be written",
            problem.strerror or str(problem),
            "choose another place with --set run.folder=PATH",
        ) from None
    except BaseException:
        run.discard()
        raise
    return run


def refuse_taken(folder: str | Path, name: str | None) -> None:
    """Raise UsageError, before any work is done for nothing, for a name that `create_run` would refuse."""
    if name is not None:
        check_name(name)
        if (Path(folder) / name).exists():
            raise _taken(Path(folder) / name)


def check_name(name: str) -> None:
    """Raise UsageError for what cannot name a run folder."""
    allowed = set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-")
    if not name or name.startswith((".", "-")) or set(name) - allowed or name == LATEST or len(name) > 120:
        raise UsageError(
            f"run name '{name}' cannot be used",
            "allowed: at most 120 of letters, digits, '.', '_', '-'; not first '.' or '-'; not 'latest'",
            "choose another with --set run.name=NAME",
        )


def _taken(path: Path) -> UsageError:
    holder = lock.holder(path / "lock")
    at_work = holder is not None and holder.alive()
    return UsageError(
        f"run '{path.name}' exists already in '{path.parent}'",
        f"{holder} is at work there" if at_work else "a run never writes over another one",
        "choose another name with --set run.name=NAME"
        + ("" if at_work else f", or go on with it: shardwise train --resume {path}"),
    )


def _claim(folder: Path, name: str | None, default_name: str) -> Path:
    """Make the folder; making it is what claims the name."""
    if name is not None:
        path = folder / name
        try:
            path.mkdir()
        except FileExistsError:
            raise _taken(path) from None
        return path
    base = f"{default_name}-{time.strftime('%Y%m%d-%H%M%S')}"
    for number in range(1, 1000):
        path = folder / (base if number == 1 else f"{base}-{number}")
        with suppress(FileExistsError):
            path.mkdir()
            return path
    raise UsageError(
        f"1000 runs named '{base}' exist in '{folder}'", "", "give the run a name: --set run.name=NAME"
    )
