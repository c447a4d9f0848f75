"""What the files of all targets are made of: the run as they see it, and words quoted for what reads them."""

import json
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Literal, Protocol

from shardwise.errors import RecipeError
from shardwise.launch.cluster import ranks_per_node
from shardwise.recipe import Recipe

RECIPE, PLAN = "recipe.yaml", "plan.json"
OUTCOME = "outcome.json"  # beside the recipe: exit code and reason of the newest start
PORT = 29400  # torchrun's usual one; Slurm jobs derive their own, since they may share a node
JOIN_SECONDS = 1800  # a node may fetch a model and prepare rows while the others wait


@dataclass(frozen=True)
class Launched:
    """A run on its way to a scheduler. `folder` holds its recipe, its script and job.json; absolute.

    `recipe` is decided but for `engine.processes`, which counts the ranks of one node.
    """

    name: str
    recipe: Recipe
    folder: Path
    recipe_text: str
    mounts: Mapping[str, str] = field(default_factory=dict)  # local files of the recipe, where they must lie

    @property
    def nodes(self) -> int:
        return self.recipe.launch.nodes

    @property
    def ranks_per_node(self) -> int:
        return ranks_per_node(self.recipe)

    @property
    def run_path(self) -> PurePath:
        return PurePath(self.recipe.run.folder) / self.name

    @property
    def size(self) -> str:
        """For a file's first line: '2 nodes x 8 H100-80GB'."""
        gpus, ranks = self.recipe.launch.gpus, self.ranks_per_node
        what = gpus.replace("x", " x ", 1) if gpus else f"{ranks} processor rank{'s' if ranks > 1 else ''}"
        return f"{self.nodes} node{'s' if self.nodes > 1 else ''} of {what}"


State = Literal["waiting", "running", "ended", "unknown"]


@dataclass(frozen=True)
class Seen:
    """A job as its scheduler tells it; `word` is the scheduler's own."""

    state: State
    word: str
    exit_code: int | None = None  # of a job that has ended, where the scheduler tells it


class Target(Protocol):
    """What a module of this folder offers. `submit` returns the scheduler's id of the job."""

    SCRIPT: str

    def render(self, run: Launched) -> str: ...
    def submit(self, script: Path, run: Launched) -> str: ...
    def look(self, job_id: str) -> Seen: ...
    def cancel(self, job_id: str, now: bool) -> None: ...


def require_environment(run: Launched, who: str) -> None:
    """Raise RecipeError when a variable of launch.environment is not set here. `who` takes the values from here."""
    missing = [name for name in run.recipe.launch.environment if name not in os.environ]
    if missing:
        raise RecipeError(
            f"launch.environment names {', '.join(missing)}, which is not set here",
            f"{who} takes the values from this shell",
            f"export {missing[0]}=... first, or take it out of launch.environment",
        )


def shell(text: object) -> str:
    """One shell word that stands for exactly `text`. Raises RecipeError on control characters."""
    return shlex.quote(clean(str(text)))


def yaml(text: object) -> str:
    """A YAML (1.1 and 1.2) scalar that stands for exactly the string `text`."""
    return json.dumps(clean(str(text)), ensure_ascii=False)


def comment(text: object) -> str:
    """Text for a comment line: it must not end the line."""
    return clean(str(text))


def clean(text: str) -> str:
    """Refuse what would end a line or hide in a terminal."""
    bad = sorted({c for c in text if not c.isprintable()})
    if bad:
        raise RecipeError(
            f"{text!r} cannot stand in a script",
            f"it holds the control character(s) {', '.join(map(repr, bad))}",
            "write it in one line of printable characters",
        )
    return text


def one_line(said: str) -> str:
    """What a program wrote to standard error, for the `why:` of an error; its last words count most."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    return "; ".join(lines)[-1000:]


def torchrun(
    run: Launched, rendezvous: str | None, rendezvous_id: str, is_host: str | None = None
) -> list[str]:
    """The launcher's options, one a line, quoted; what comes as an argument is shell text as given.

    `is_host`: 1 on the node that keeps the rendezvous; without it torchrun compares host names.
    """
    launch = run.recipe.launch
    lines = ["torchrun", f"--nnodes={run.nodes}", f"--nproc-per-node={run.ranks_per_node}"]
    host = f"is_host={is_host}," if is_host else ""
    if rendezvous is not None:
        lines += [
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint={rendezvous}",
            f"--rdzv-id={rendezvous_id}",
            f"--rdzv-conf={host}join_timeout={JOIN_SECONDS},read_timeout={JOIN_SECONDS}",
        ]
    lines += [
        f"--max-restarts={launch.max_restarts}",
        f"--shutdown-timeout={launch.stop_seconds}",
        f"-m shardwise.launch.rank {shell(run.run_path)}",
    ]
    return lines


def wrapper(run: Launched, python: str, recipe: str, owner: str, attempt: str, *more: str) -> list[str]:
    """The command every node runs, in front of the launcher's; arguments are shell text as given."""
    return [
        f"{python} -m shardwise.launch.wrapper",
        f"--recipe {recipe}",
        f"--name {shell(run.name)}",
        f"--owner {owner}",
        f"--attempt {attempt}",
        *more,
        "--",
    ]


def continued(lines: Sequence[str], indent: str = "  ") -> str:
    """Lines of one shell command."""
    return f" \\\n{indent}".join(lines)
