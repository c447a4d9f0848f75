"""Starting, stopping and going on with runs: always through the command `shardwise train`, in a process of its own.

A run lives on when the page ends. It is stopped as Ctrl-C would: SIGTERM to the launcher, which saves and ends.
"""

import hashlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from shardwise.errors import UsageError
from shardwise.recipe import Recipe, parse_recipe
from shardwise.runs import RunFolder
from shardwise.runs.jsonfile import write_text

CHECK_SECONDS = 600


@dataclass(frozen=True)
class Checked:
    """A recipe and what `shardwise train --dry-run` said of it. `digest` names exactly this text."""

    digest: str
    recipe: str
    plan: str
    exit_code: int


@dataclass
class Jobs:
    """`started` are the launchers this page began; their words go to a file beside the runs."""

    folder: Path
    checked: dict[str, Checked] = field(default_factory=dict)
    started: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def check(self, recipe_text: str) -> Checked:
        """Resolve and plan a recipe without starting it. Raises RecipeError when it is not well-formed."""
        parse_recipe(recipe_text, "recipe")
        digest = hashlib.sha256(recipe_text.encode()).hexdigest()[:16]
        path = self._keep(digest, recipe_text)
        done = subprocess.run(
            command("train", str(path), "--dry-run", "--set", f"run.folder={self.folder}"),
            capture_output=True,
            text=True,
            errors="replace",
            timeout=CHECK_SECONDS,
            env={**os.environ, "COLUMNS": "100", "NO_COLOR": "1"},
            stdin=subprocess.DEVNULL,
        )
        said = (done.stdout + done.stderr).replace(str(path), "recipe")
        found = Checked(digest, recipe_text, said, done.returncode)
        self.checked[digest] = found
        return found

    def start(self, digest: str) -> str:
        """Start a recipe that was checked and whose plan a person has seen. Returns the run's name."""
        found = self.checked.get(digest)
        if found is None:
            raise UsageError(
                "this recipe was not checked here", "only a plan that was shown is run", "check it first"
            )
        if found.exit_code != 0:
            raise UsageError("this recipe cannot run", "its check failed", "mend it and check it again")
        recipe = parse_recipe(found.recipe, "recipe")
        name = recipe.run.name or _name(recipe)
        path = self._keep(digest, found.recipe)
        settings = ("--set", f"run.folder={self.folder}", "--set", f"run.name={name}")
        self.started[name] = self._spawn(name, "train", str(path), *settings)
        return name

    def resume(self, run: RunFolder) -> str:
        """Go on from the last checkpoint."""
        if run.holder() is not None:
            raise UsageError(f"run '{run.name}' is at work", f"{run.holder()} works in it", "stop it first")
        if not run.checkpoints():
            raise UsageError(
                f"run '{run.name}' has no checkpoint", "there is nothing to go on from", "start it anew"
            )
        self.started[run.name] = self._spawn(run.name, "train", "--resume", str(run.path))
        return run.name

    def stop(self, run: RunFolder) -> str:
        """Ask the run's launcher to save and end."""
        holder = run.holder()
        if holder is None:
            raise UsageError(
                f"run '{run.name}' is not at work", "no process holds its folder", "reload the page"
            )
        if not holder.here:
            raise UsageError(
                f"run '{run.name}' is at work on {holder.host}",
                "it cannot be reached from here",
                "stop it there",
            )
        if not _is_ours(holder.pid):
            raise UsageError(
                f"{holder} is no run of shardwise", "its lock file names a stranger", "stop it by hand"
            )
        try:
            os.kill(holder.pid, signal.SIGTERM)
        except OSError as problem:
            raise UsageError(
                f"{holder} cannot be stopped", str(problem), "stop it as the user who started it"
            ) from None
        return str(holder)

    def poll(self, key: str) -> tuple[int | None, str]:
        """(exit code or None while it runs, the end of what the launcher said)."""
        process = self.started.get(key)
        try:
            words = self._words(key).read_bytes()[-8192:].decode("utf-8", "replace")
        except OSError:
            words = ""
        return (process.poll() if process else 1), "\n".join(
            w.rsplit("\r", 1)[-1] for w in words.split("\n")[-40:]
        )

    def _spawn(self, key: str, *arguments: str) -> "subprocess.Popen[bytes]":
        with self._words(key).open("wb") as words:
            return subprocess.Popen(
                command(*arguments),
                stdin=subprocess.DEVNULL,
                stdout=words,
                stderr=words,
                start_new_session=True,  # Ctrl-C on the page's terminal is not meant for the run
            )

    def _keep(self, digest: str, recipe_text: str) -> Path:
        path = self._own() / f"{digest}.yaml"
        write_text(path, recipe_text)
        return path

    def _words(self, key: str) -> Path:
        return self._own() / f"{key}.log"

    def _own(self) -> Path:
        """A folder of the page's own among the runs; it is no run and is not listed as one."""
        path = self.folder / ".web"
        path.mkdir(parents=True, exist_ok=True)
        return path


def _name(recipe: Recipe) -> str:
    """As `shardwise train` would call it."""
    model = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(recipe.model.source).name).strip("-.").lower() or "run"
    return f"{model}-{recipe.method}-{time.strftime('%Y%m%d-%H%M%S')}"


def _is_ours(pid: int) -> bool:
    """Whether a process runs shardwise, as far as the system tells: a lock file could name any process."""
    try:
        return b"shardwise" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return True


def command(*arguments: str) -> Sequence[str]:
    return [sys.executable, "-m", "shardwise.cli.main", *arguments]
