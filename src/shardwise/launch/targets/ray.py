"""Ray: a driver whose TorchTrainer places the ranks of the same run on an existing Ray cluster."""

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from shardwise.errors import MissingDependencyError, RecipeError, UsageError
from shardwise.launch.environment import variables
from shardwise.launch.targets.parts import RECIPE, Launched, Seen, comment, require_environment
from shardwise.runs.lock import Holder, holder_of

SCRIPT = "driver.py"
LOG = "driver.log"


def render(run: Launched) -> str:
    """The driver, a Python program: every value is a Python literal. Raises RecipeError for `setup`."""
    launch = run.recipe.launch
    if launch.setup:
        raise RecipeError(
            "launch.setup is not run on Ray",
            "its workers are up already when a run comes",
            "do it where the cluster is started: before ray start, or in setup_commands of its YAML",
        )
    fixed = [f"{v.name!r}: {v.value!r},  # {comment(v.reason)}" for v in variables(run.recipe)]
    handed = [f"{name!r}: os.environ[{name!r}]," for name in launch.environment]
    secrets = f"""# Values come from this shell. Ray writes a runtime_env into its logs: these travel as an object.
SECRETS = {_braces(handed)}
"""
    gpu = launch.gpus is not None
    resources = json.dumps({"CPU": launch.ray.cpus_per_rank, **({"GPU": 1} if gpu else {})})
    links = f"""
    # Every rank must answer before training; a slow link becomes a warning of the run.
    look_at_links(started, {resources})"""
    imported = "begin, connect, end, look_at_links, rank, refuse"
    imported = imported if launch.preflight else imported.replace("look_at_links, ", "")
    return f"""# Run {comment(run.name)} on {comment(run.size)}. Written by: shardwise launch --on ray
# Start it on a machine of the Ray cluster:  python {SCRIPT}
# All nodes must see the run folder, the model and the data under the same paths, and have shardwise installed.
# Ray's own ports have no login: use a private network.

import os
import sys
from pathlib import Path

import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

from shardwise.errors import ShardwiseError
from shardwise.launch.ray_worker import {imported}

NAME = {run.name!r}
RECIPE = Path({str(run.folder / RECIPE)!r})
os.chdir({str(Path.cwd())!r})
{"# Variables of every rank." if fixed else "# No variable needs to be set for the ranks."}
ENVIRONMENT = {_braces(fixed)}
{secrets if handed else ""}
started = begin(RECIPE, NAME)  # model, rows and run folder, before a rank starts
try:
    connect({launch.ray.address!r}, ENVIRONMENT){links if launch.preflight else ""}
except ShardwiseError as problem:
    sys.exit(refuse(started, problem))
trainer = TorchTrainer(
    rank,
    train_loop_config={{
        "run": str(started.run.path.resolve()),
        "recipe": str(RECIPE),
        "ready": ray.util.get_node_ip_address(),  # the other nodes fetch the model and prepare rows themselves
        "directory": os.getcwd(),
        "environment": dict(started.environment),
        "secrets": [ray.put({"SECRETS" if handed else "{}"})],
    }},
    torch_config=TorchConfig(backend={"nccl" if gpu else "gloo"!r}),
    scaling_config=ScalingConfig(
        num_workers={run.nodes * run.ranks_per_node},
        use_gpu={gpu},
        resources_per_worker={resources},
        placement_strategy={strategy(run.ranks_per_node)!r},
    ),
    run_config=RunConfig(
        name=NAME,
        storage_path=str(started.run.logs_path.resolve() / "ray"),
        # A lost worker or node: Ray starts all ranks again, and they resume from the run's newest checkpoint.
        failure_config=FailureConfig(max_failures={launch.max_restarts}),
    ),
)
try:
    trainer.fit()
    code = 0
except Exception as problem:  # the ranks' own records say why; this is for what happened before them
    print(f"shardwise: Ray Train ended with: {{problem}}", file=sys.stderr)
    code = 1
sys.exit(end(started, code))
"""


def _braces(lines: list[str]) -> str:
    """A dict, one item a line."""
    return "{\n" + "".join(f"    {line}\n" for line in lines) + "}" if lines else "{}"


def strategy(ranks_per_node: int) -> str:
    """How Ray places ranks: one a node on as many nodes as there are; several on as few as have room."""
    return "SPREAD" if ranks_per_node == 1 else "PACK"


def submit(script: Path, run: Launched) -> str:
    """Start the driver in the background; returns its process id.

    Raises RecipeError for a variable that is not set, MissingDependencyError without Ray.
    """
    require_environment(run, "the driver")
    if run.recipe.launch.python is None and find_spec("ray") is None:
        raise MissingDependencyError(
            "Ray is not installed here", "the driver is a program of Ray Train", "pip install 'ray[train]'"
        )
    python = run.recipe.launch.python or sys.executable
    with (script.parent / LOG).open("ab") as log:
        process = subprocess.Popen(
            [python, str(script)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            env={"RAY_USAGE_STATS_ENABLED": "0", **os.environ},
        )
    found = holder_of(process.pid)
    return f"{found.pid}@{found.host}@{found.started}"


def _driver(job_id: str) -> Holder:
    try:
        pid, host, started = job_id.split("@")
        return Holder(int(pid), host, int(started), 0.0)
    except ValueError:
        raise UsageError(
            f"job '{job_id}' names no driver",
            "it was launched by another version",
            "look into its run folder",
        ) from None


def look(job_id: str) -> Seen:
    """Whether the driver still runs on this machine."""
    driver = _driver(job_id)
    if not driver.here:
        return Seen("unknown", f"driver is {driver}")
    with suppress(ChildProcessError):  # our own child, which stays a zombie otherwise
        ended, status = os.waitpid(driver.pid, os.WNOHANG)
        if ended:
            return Seen("ended", "the driver has ended", os.waitstatus_to_exitcode(status))
    if not driver.alive():
        return Seen("ended", "the driver has ended")
    return Seen("running", f"driver is process {driver.pid}")


def cancel(job_id: str, now: bool) -> None:
    """`now`: end the driver and with it the ranks. Otherwise the run's stop file does it.

    Raises UsageError when the driver runs on another machine.
    """
    driver = _driver(job_id)
    if now and not driver.here:
        raise UsageError(
            f"the driver is {driver}", "it can be ended there only", f"on {driver.host}, say it again"
        )
    if now and driver.alive():
        with suppress(ProcessLookupError):
            os.kill(driver.pid, signal.SIGKILL)
