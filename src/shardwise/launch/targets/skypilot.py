"""SkyPilot: one task file; as a managed job it is recovered on another machine, where the run resumes."""

import json
import subprocess
from pathlib import Path

from shardwise import __version__
from shardwise.errors import MissingDependencyError, RecipeError, RunError, UsageError
from shardwise.facts.gpus import parse_offer
from shardwise.launch.environment import variables
from shardwise.launch.targets.parts import (
    PORT,
    RECIPE,
    Launched,
    Seen,
    comment,
    continued,
    one_line,
    require_environment,
    shell,
    torchrun,
    wrapper,
    yaml,
)

SCRIPT = "task.yaml"
SECONDS = 1800  # the first job of a person starts a controller first
HOME = "/shardwise"  # on the machines: the recipe, its files, and runs
# Where SkyPilot's catalogue spells a GPU in another way than ours (sky gpus list); the rest are the same.
NAMES = {
    "H100-80GB": "H100", "A100-40GB": "A100", "V100-16GB": "V100", "RTX-A6000": "RTXA6000",
    "RTX-6000-Ada": "RTX6000-Ada", "RTX-PRO-6000": "RTXPRO6000",
}  # fmt: skip


def render(run: Launched) -> str:
    """The task file. Raises RecipeError where the run folder would be lost or not shared."""
    launch, asked = run.recipe.launch, run.recipe.launch.skypilot
    if asked.volume is None and asked.bucket is None:
        raise RecipeError(
            "the run folder has no place that outlives a machine",
            "a recovered job resumes from it",
            "make a volume (sky volumes apply) and name it in launch.skypilot.volume",
        )
    if asked.volume is None and run.nodes > 1:
        raise RecipeError(
            f"a bucket cannot hold the run folder of {run.nodes} nodes",
            "nodes must see each other's files at once, and a cached bucket shows them late",
            "make a volume (sky volumes apply) and name it in launch.skypilot.volume",
        )
    task = '"$SKYPILOT_TASK_ID"'
    command = continued(
        [*wrapper(run, shell(launch.python or "python"), f"{HOME}/{RECIPE}", task, task, f"--directory {HOME}"),
         *torchrun(run, f'"$head:{PORT}"', task)],
        "    ",
    )  # fmt: skip
    exports = "".join(
        f"  export {v.name}={shell(v.value)}   # {comment(v.reason)}\n" for v in variables(run.recipe)
    )
    again = "".join(f"--secret {name} " for name in launch.environment)
    setup = "".join(f"  {comment(line)}\n" for line in launch.setup)
    return f"""# Run {comment(run.name)} on {comment(run.size)}. Written by: shardwise launch --on skypilot
# Submit it again with: sky jobs launch {again}{SCRIPT}
name: {yaml(run.name)}
num_nodes: {run.nodes}
resources:
{_resources(run)}
file_mounts:
  {HOME}/{RECIPE}: {yaml(run.folder / RECIPE)}
{_mounts(run)}{_storage(run)}{_secrets(run)}setup: |
  pip install {shell(_packages(run))}
{setup}run: |
  head=$(echo "$SKYPILOT_NODE_IPS" | head -n 1)   # the first node is the rendezvous
{exports}  {command}
"""


def _packages(run: Launched) -> str:
    """What the machines install: the version that launches, with what the recipe needs."""
    extras = ["train", "data"]
    extras += ["qlora"] if run.recipe.method == "qlora" else []
    extras += ["deepspeed"] if run.recipe.engine.name in ("deepspeed", "auto") else []
    return f"shardwise[{','.join(extras)}]=={__version__}"


def _resources(run: Launched) -> str:
    launch, asked = run.recipe.launch, run.recipe.launch.skypilot
    why = "   # may be taken away: the managed job recovers and resumes" if asked.use_spot else ""
    lines = [f"  use_spot: {str(asked.use_spot).lower()}{why}"]
    if launch.gpus is not None:
        offer = parse_offer(launch.gpus)
        name = NAMES.get(offer.gpu.name, offer.gpu.name)
        lines.insert(0, f"  accelerators: {yaml(f'{name}:{offer.count}')}")
    else:
        lines.insert(0, f"  cpus: {yaml(f'{2 * run.ranks_per_node}+')}")
    if asked.infra is not None:
        lines.insert(0, f"  infra: {yaml(asked.infra)}")
    lines += [
        "  job_recovery:",
        f"    max_restarts_on_errors: {launch.max_restarts}",
        "    recover_on_exit_codes: [75]   # stopped with its state saved: resume",
    ]
    return "\n".join(lines)


def _mounts(run: Launched) -> str:
    """Local files of the recipe, each at the place the recipe names."""
    lines = []
    for local, there in run.mounts.items():
        target = there if there.startswith("/") else f"{HOME}/{there}"
        lines.append(f"  {yaml(target)}: {yaml(local)}\n")
    return "".join(lines)


def _storage(run: Launched) -> str:
    asked, folder = run.recipe.launch.skypilot, run.recipe.run.folder
    place = folder if folder.startswith("/") else f"{HOME}/{folder}"
    if asked.volume is not None:
        return f"volumes:\n  {yaml(place)}: {yaml(asked.volume)}   # the run folder outlives the machines\n"
    return (
        f"  {yaml(place)}:   # the run folder outlives the machine; written back as it is filled\n"
        f"    name: {yaml(asked.bucket)}\n    mode: MOUNT_CACHED\n"
    )


def _secrets(run: Launched) -> str:
    """Names alone: `sky jobs launch --secret NAME` takes the value from the shell."""
    names = "".join(f"  {name}: null\n" for name in run.recipe.launch.environment)
    return f"secrets:   # their values come from the shell that submits\n{names}" if names else ""


def submit(script: Path, run: Launched) -> str:
    """sky jobs launch, which returns once the job is queued; returns the job's name.

    Raises RecipeError for a secret that is not set here, UsageError with sky's own words.
    """
    require_environment(run, "sky")
    secrets = [part for name in run.recipe.launch.environment for part in ("--secret", name)]
    try:
        _sky("jobs", "launch", "--yes", "--detach-run", "--name", run.name, *secrets, str(script))
    except RunError as problem:
        raise UsageError("SkyPilot does not take the job", problem.why, problem.hint) from None
    return run.name


def look(job_id: str) -> Seen:
    found = json.loads(_sky("jobs", "queue", "--output", "json") or "[]")
    mine = [j for j in found if j.get("job_name") == job_id]
    if not mine:
        return Seen("unknown", "not in the queue")
    status = str(max(mine, key=lambda j: j.get("job_id", 0)).get("status", ""))
    word = status.lower().replace("_", " ")
    if status in ("PENDING", "SUBMITTED", "STARTING", "RECOVERING"):
        return Seen("waiting", word)
    if status.startswith("FAILED") or status in ("SUCCEEDED", "CANCELLED"):
        return Seen("ended", word, 0 if status == "SUCCEEDED" else 1)  # it does not tell the exit code
    return Seen("running", word)


def log(job_id: str, lines: int) -> str:
    """The last lines of the job."""
    return _sky("jobs", "logs", "--name", job_id, "--no-follow", "--tail", str(lines))


def cancel(job_id: str, now: bool) -> None:
    """Ends the managed job and its machines; unless `now`, what a bucket still caches is written back first."""
    _sky("jobs", "cancel", "--yes", *([] if now else ["--graceful"]), "--name", job_id)


def _sky(*arguments: str) -> str:
    try:
        done = subprocess.run(
            ["sky", *arguments], capture_output=True, text=True, check=False, timeout=SECONDS
        )
    except FileNotFoundError:
        raise MissingDependencyError(
            "'sky' is not here", "it talks to the clouds", "pip install skypilot, or look with --dry-run"
        ) from None
    except subprocess.TimeoutExpired:
        raise RunError("sky does not answer", f"waited {SECONDS} s", "try: sky api status") from None
    if done.returncode:
        raise RunError(f"sky {arguments[1]} failed", one_line(done.stderr), "try: sky check")
    return done.stdout
