"""Slurm: one sbatch script; srun starts one launcher per node, torchrun starts the node's ranks."""

import re
import subprocess
import sys
from collections.abc import Collection, Sequence
from pathlib import Path

from shardwise.errors import MissingDependencyError, RecipeError, RunError, UsageError
from shardwise.launch.environment import variables
from shardwise.launch.targets.parts import (
    RECIPE,
    Launched,
    Seen,
    clean,
    comment,
    continued,
    one_line,
    require_environment,
    shell,
    torchrun,
    wrapper,
)

SCRIPT, ARRAY_SCRIPT = "job.sbatch", "array.sbatch"
CANCELLED = "cancelled"  # a file beside the script: a stop that a person asked for is not requeued
_WAITING = {"PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD"}
_RUNNING = {"RUNNING", "COMPLETING", "CONFIGURING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT"}


def render(run: Launched, array: str | None = None) -> str:
    """The batch script; `array`: the name of the job array of which it is a task.

    Raises RecipeError for a value that an #SBATCH line cannot hold.
    """
    launch = run.recipe.launch
    python = shell(launch.python or ("python" if launch.slurm.container else sys.executable))
    step = _container(run) + continued(
        [
            *wrapper(run, python, shell(run.folder / RECIPE), '"slurm-$job"', '"$attempt"'),
            *torchrun(run, '"$MASTER_ADDR:$port"', '"$attempt"'),
        ],
        "  ",
    )
    exports = [f"export {v.name}={shell(v.value)}  # {comment(v.reason)}" for v in variables(run.recipe)]
    setup = [comment(line) for line in launch.setup]
    between = "".join(f"{line}\n" for line in [*exports, *setup])
    job, head = "$SLURM_JOB_ID", _directives(run, run.name, run.folder, "slurm-%j.out")
    if array is not None:  # of one task, not of all
        job = "${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"
        head = f"# A task of the job array {comment(array)}, whose script has Slurm's options and starts this one."
    names = "".join(
        f"# {name} comes from the submitter's environment (--export=ALL)\n" for name in launch.environment
    )
    return f"""#!/bin/bash
# Run {comment(run.name)} on {comment(run.size)}. Written by: shardwise launch --on slurm
{head}
{names}
# No -e: a failing step must reach the lines below that decide about a requeue.
set -uo pipefail
cd {shell(Path.cwd())}
{between}
# The first node keeps the rendezvous.
export MASTER_ADDR=${{MASTER_ADDR:-$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)}}
port=$((20000 + SLURM_JOB_ID % 20000))   # its own for each job: jobs may share a node
job={job}
restarts=${{SLURM_RESTART_COUNT:-0}}
attempt=$job-$restarts   # a fresh rendezvous for every start
outcome={shell(run.run_path / "logs")}/outcome-$attempt
cancelled={shell(run.folder / CANCELLED)}

# Before the time limit Slurm sends USR1 to this shell: the steps save and stop.
trap 'scancel --signal=TERM "$job"' USR1
# One launcher per node. When one ends, the others have this long to finish their own save.
srun --kill-on-bad-exit=0 --wait={launch.stop_seconds} {_cpus(run)}{step} &
step=$!
wait "$step"; code=$?
while kill -0 "$step" 2>/dev/null; do wait "$step"; code=$?; done   # a signal ends `wait`, not the step

# torchrun and srun lose the ranks' exit code: 0 done, 1 failed, 2 refused, 75 stopped with the state saved.
[[ -r $outcome ]] && code=$(<"$outcome")
if [[ $code == 75 && ! -e $cancelled && $restarts -lt {launch.max_restarts} ]]; then
  echo "pre-empted or out of time with the state saved: back into the queue"
  scontrol requeue "$job" && sleep 300      # Slurm ends this shell
fi
exit "$code"
"""


def _cpus(run: Launched) -> str:
    """srun does not take --cpus-per-task over from sbatch since Slurm 22.05: a step would get one core."""
    return "" if run.recipe.launch.gpus is not None else f"--cpus-per-task={run.ranks_per_node} "


def render_array(name: str, runs: Sequence[Launched], folder: Path) -> str:
    """A job array that starts one of several runs' own scripts in every task.

    Raises RecipeError when the runs do not ask Slurm for the same.
    """
    asked = [_directives(run, name, folder, "task-%a.out") for run in runs]
    for run, other in zip(runs, asked, strict=True):
        if other != asked[0]:
            lines = zip(asked[0].splitlines(), other.splitlines(), strict=False)
            first, second = next((a, b) for a, b in [*lines, (asked[0], other)] if a != b)
            raise RecipeError(
                f"'{runs[0].name}' and '{run.name}' cannot be tasks of one array",
                f"all tasks get the same resources, and one says {first}, the other {second}",
                "make their launch: sections alike, or launch them one by one",
            )
    at_once = runs[0].recipe.launch.slurm.at_once
    tasks = f"0-{len(runs) - 1}" + (f"%{at_once}" if at_once else "")
    scripts = "\n".join(f"  {shell(run.folder / SCRIPT)}" for run in runs)
    return f"""#!/bin/bash
# {len(runs)} runs as one job array, each on {comment(runs[0].size)}. Written by: shardwise launch --on slurm
{asked[0]}
#SBATCH --array={tasks}

scripts=(
{scripts}
)
script=${{scripts[$SLURM_ARRAY_TASK_ID]}}
# exec: Slurm's signals reach the run's own script. A requeued task goes on in the same log.
exec bash "$script" >> "$(dirname "$script")/slurm-$SLURM_ARRAY_JOB_ID.out" 2>&1
"""


def submit(script: Path, run: Launched) -> str:
    """sbatch; returns the job's number. Raises UsageError with sbatch's own words."""
    require_environment(run, "sbatch")
    try:
        return _slurm("sbatch", "--parsable", str(script)).split(";")[0].strip()
    except RunError as problem:
        raise UsageError(
            "Slurm does not take the job", problem.why, "mend launch.slurm; partitions and limits: sinfo"
        ) from None


def look(job_id: str) -> Seen:
    """The state in the queue; a job that left it has ended."""
    try:
        word = _slurm("squeue", "--noheader", "--format=%T", "--jobs", job_id).split()
    except RunError as problem:
        if "Invalid job id" in problem.why:
            return _ended(job_id)
        raise
    if not word:
        return _ended(job_id)
    state = "waiting" if word[0] in _WAITING else "running" if word[0] in _RUNNING else "ended"
    if state == "ended":
        return _ended(job_id)
    return Seen(state, word[0].lower().replace("_", " "))  # type: ignore[arg-type]


def _ended(job_id: str) -> Seen:
    """State and exit code, which slurmctld remembers for MinJobAge (300 s) after the end."""
    try:
        told = _slurm("scontrol", "--oneliner", "show", "job", job_id)
    except RunError:
        return Seen("ended", "left the queue")
    fields = dict(word.split("=", 1) for word in told.split() if "=" in word)
    code, _, signal = fields.get("ExitCode", "1:0").partition(":")
    if fields.get("JobState") == "COMPLETED":
        return Seen("ended", "completed", 0)
    found = int(code) or 1 if signal in ("", "0") else 1
    return Seen("ended", fields.get("JobState", "left the queue").lower().replace("_", " "), found)


def cancel(job_id: str, now: bool) -> None:
    """TERM to the steps, which save and stop; `now`, or a job that has not started: out of the queue."""
    if now or look(job_id).state == "waiting":
        _slurm("scancel", job_id)
    else:
        _slurm("scancel", "--signal=TERM", job_id)


def _directives(run: Launched, name: str, folder: Path, output: str) -> str:
    """`output` may hold Slurm's %j or %a; percent signs of the folder stand for themselves."""
    launch = run.recipe.launch
    lines = [
        ("--job-name", name, ""),
        ("--output", f"{folder}/".replace("%", "%%") + output, ""),
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
    lines += _options(asked.options, {option for option, _, _ in lines})
    return "\n".join(_directive(option, str(value), why) for option, value, why in lines)


def _options(asked: Sequence[str], taken: Collection[str]) -> list[tuple[str, str, str]]:
    """What a person adds. Raises RecipeError for what is no long option, or is set by this file already."""
    found = []
    for text in asked:
        option, _, value = text.partition("=")
        if not re.fullmatch(r"--[a-z][a-z0-9-]*", option) or option in (
            *taken,
            "--array",
            "--wrap",
            "--export",
        ):
            raise RecipeError(
                f"launch.slurm.options: {text!r} cannot be added",
                "it is set by other keys of the recipe"
                if option in taken
                else "it is no option that may be added",
                "write long options as sbatch has them: --name or --name=value",
            )
        found.append((option, value, "launch.slurm.options"))
    return found


def _directive(option: str, value: str, why: str) -> str:
    """One #SBATCH line. Slurm reads it, not a shell: blanks need double quotes, and there is no escape."""
    clean(value)
    if '"' in value or "\\" in value:
        raise RecipeError(
            f"{option}={value} cannot stand in an #SBATCH line",
            "it holds a double quote or a backslash",
            "choose another name or folder",
        )
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
        mounts = ",".join(f"{folder}:{folder}" for folder in _mounts(run))
        lines = [f"--container-image={shell(image)}", f"--container-mounts={shell(mounts)}",
                 f"--container-workdir={shell(here)}"]  # fmt: skip
    else:
        lines = [f"apptainer exec{' --nv' if launch.gpus else ''} --pwd {shell(here)}",
                 *(f"--bind {shell(folder)}" for folder in _mounts(run)), shell(image)]  # fmt: skip
    return continued([*lines, ""], "  ")


def _mounts(run: Launched) -> list[Path]:
    """Folders that the container must see, outermost only: here, the runs, local model and data, the cache.

    Raises RecipeError for a folder that neither runtime can mount.
    """
    here, launch = Path.cwd(), run.recipe.launch
    wanted = [here, run.folder.parent, Path(run.recipe.run.folder).absolute()]
    wanted += [path if path.is_dir() else path.parent for path in map(Path, run.mounts)]
    wanted += [Path(launch.cache)] if launch.cache else []
    for path in wanted:
        if any(c in str(path) for c in ",:"):
            raise RecipeError(
                f"'{path}' cannot be mounted into the container",
                "commas and colons separate mounts there",
                "use folders without them",
            )
    return sorted({p for p in wanted if not any(other in p.parents for other in wanted)})


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
            f"{' '.join(command[:2])} failed", one_line(done.stderr) or f"exit code {done.returncode}",
            "is slurmctld up? try: sinfo",
        )  # fmt: skip
    return done.stdout
