"""Slurm: one sbatch script; srun starts one launcher per node, torchrun starts the node's ranks."""

import os
import subprocess
import sys
from pathlib import Path

from shardwise.errors import MissingDependencyError, RecipeError, RunError
from shardwise.launch.environment import variables
from shardwise.launch.targets.parts import (
    RECIPE,
    Launched,
    Seen,
    clean,
    comment,
    continued,
    shell,
    torchrun,
    wrapper,
)

SCRIPT = "job.sbatch"
CANCELLED = "cancelled"  # a file beside the script: a stop that a person asked for is not requeued
_WAITING = {"PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD"}
_RUNNING = {"RUNNING", "COMPLETING", "CONFIGURING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT"}


def render(run: Launched) -> str:
    """The batch script. Raises RecipeError for a value that an #SBATCH line cannot hold."""
    launch = run.recipe.launch
    python = shell(launch.python or sys.executable)
    step = _container(run) + continued(
        [
            *wrapper(run, python, shell(run.folder / RECIPE), '"slurm-$SLURM_JOB_ID"', '"$attempt"'),
            *torchrun(run, '"$MASTER_ADDR:$port"', '"$attempt"'),
        ],
        "  ",
    )
    exports = [f"export {v.name}={shell(v.value)}  # {comment(v.reason)}" for v in variables(run.recipe)]
    setup = [comment(line) for line in launch.setup]
    between = "\n".join([*exports, *setup]) + ("\n" if exports or setup else "")
    names = "".join(
        f"# {name} comes from the submitter's environment (--export=ALL)\n" for name in launch.environment
    )
    return f"""#!/bin/bash
# Run {comment(run.name)} on {comment(run.size)}. Written by: shardwise launch --on slurm
{_directives(run)}
{names}
# No -e: a failing step must reach the lines below that decide about a requeue.
set -uo pipefail
cd {shell(Path.cwd())}
{between}
export MASTER_ADDR=${{MASTER_ADDR:-$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)}}
port=$((20000 + SLURM_JOB_ID % 20000))               # its own for each job: jobs may share a node
attempt=$SLURM_JOB_ID-${{SLURM_RESTART_COUNT:-0}}      # a fresh rendezvous for every start
outcome={shell(run.run_path / "logs")}/outcome-$attempt
cancelled={shell(run.folder / CANCELLED)}
restarts=${{SLURM_RESTART_COUNT:-0}}

# Before the time limit Slurm sends USR1 to this shell: the steps save and stop.
trap 'scancel --signal=TERM "$SLURM_JOB_ID"' USR1
# One launcher per node. When one ends, the others have this long to finish their own save.
srun --kill-on-bad-exit=0 --wait={launch.stop_seconds} {step} &
step=$!
wait "$step"; code=$?
while kill -0 "$step" 2>/dev/null; do wait "$step"; code=$?; done   # a signal ends `wait`, not the step

# torchrun and srun lose the ranks' exit code: 0 done, 1 failed, 2 refused, 75 stopped with the state saved.
[[ -r $outcome ]] && code=$(<"$outcome")
if [[ $code == 75 && ! -e $cancelled && $restarts -lt {launch.max_restarts} ]]; then
  echo "pre-empted or out of time with the state saved: back into the queue"
  scontrol requeue "$SLURM_JOB_ID" && sleep 300      # Slurm ends this shell
fi
exit "$code"
"""


def submit(script: Path, run: Launched) -> str:
    """sbatch; returns the job's number. Raises RunError with sbatch's own words."""
    missing = [name for name in run.recipe.launch.environment if name not in os.environ]
    if missing:
        raise RecipeError(
            f"launch.environment names {', '.join(missing)}, which is not set here",
            "sbatch hands the submitter's environment on",
            f"export {missing[0]}=... first, or take it out of launch.environment",
        )
    return _slurm("sbatch", "--parsable", str(script)).split(";")[0].strip()


def look(job_id: str) -> Seen:
    """The state in the queue; a job that left it has ended."""
    try:
        word = _slurm("squeue", "--noheader", "--format=%T", "--jobs", job_id).split()
    except RunError as problem:
        if "Invalid job id" in problem.why:
            return Seen("ended", "left the queue")
        raise
    if not word:
        return Seen("ended", "left the queue")
    state = "waiting" if word[0] in _WAITING else "running" if word[0] in _RUNNING else "ended"
    return Seen(state, word[0].lower().replace("_", " "))  # type: ignore[arg-type]


def cancel(job_id: str, now: bool) -> None:
    """TERM to the steps, which save and stop; `now`, or a job that has not started: out of the queue."""
    if now or look(job_id).state == "waiting":
        _slurm("scancel", job_id)
    else:
        _slurm("scancel", "--signal=TERM", job_id)


def _directives(run: Launched) -> str:
    launch = run.recipe.launch
    lines = [
        ("--job-name", run.name, ""),
        ("--output", f"{run.folder}/slurm-%j.out", ""),
        ("--open-mode", "append", "a requeued job goes on in the same file"),
        ("--nodes", launch.nodes, ""),
        ("--ntasks-per-node", 1, "one launcher per node"),
    ]
    if launch.gpus is not None:
        lines.append(("--gpus-per-node", run.ranks_per_node, "one rank each"))
    else:
        lines.append(("--cpus-per-task", run.ranks_per_node, "a core for each rank"))
    lines += [
        ("--requeue", "", "after pre-emption or a lost node, back into the queue"),
        ("--signal", f"B:USR1@{launch.stop_seconds}", "seconds before the time limit, to this script"),
    ]
    asked = launch.slurm
    for option, value in (
        ("--partition", asked.partition),
        ("--account", asked.account),
        ("--qos", asked.qos),
        ("--time", asked.time_limit),
        ("--constraint", asked.constraint),
    ):
        if value is not None:
            lines.append((option, value, ""))
    return "\n".join(_directive(run, option, str(value), why) for option, value, why in lines)


def _directive(run: Launched, option: str, value: str, why: str) -> str:
    """One #SBATCH line. Slurm reads it, not a shell: blanks need double quotes, and there is no escape."""
    clean(value)
    if '"' in value or "\\" in value:
        raise RecipeError(
            f"{option}={value} cannot stand in an #SBATCH line",
            "it holds a double quote or a backslash",
            "choose another name or folder",
        )
    if option == "--output":  # %j is the job's number; other percent signs stand for themselves
        head, tail = value[: -len("%j.out")], "%j.out"
        value = head.replace("%", "%%") + tail
    plain = all(c.isalnum() or c in "-_./:@%,+=" for c in value)
    word = option + (f"={value}" if plain and value else f'="{value}"' if value else "")
    return f"#SBATCH {word}" + (f"{'':{max(1, 38 - len(word))}}# {why}" if why else "")


def _container(run: Launched) -> str:
    launch = run.recipe.launch
    image = launch.slurm.container
    if image is None:
        return ""
    here = Path.cwd()
    if launch.slurm.container_runtime == "pyxis":
        return (
            f"--container-image={shell(image)} --container-mounts={shell(f'{here}:{here}')} "
            f"--container-workdir={shell(here)} \\\n  "
        )
    nv = "--nv " if launch.gpus else ""
    return f"apptainer exec {nv}--bind {shell(here)} --pwd {shell(here)} {shell(image)} \\\n  "


def _slurm(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    except FileNotFoundError:
        raise MissingDependencyError(
            f"'{command[0]}' is not here", "Slurm's commands are not on the PATH",
            "run this on a login node of the cluster, or look at the script with --dry-run",
        ) from None  # fmt: skip
    except subprocess.TimeoutExpired:
        raise RunError(
            f"{command[0]} does not answer", "waited 60 s", "is slurmctld up? try: sinfo"
        ) from None
    if done.returncode:
        raise RunError(
            f"{' '.join(command[:2])} failed", done.stderr.strip() or f"exit code {done.returncode}",
            "mend it and submit again",
        )  # fmt: skip
    return done.stdout
