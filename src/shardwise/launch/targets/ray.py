"""Ray: a driver whose TorchTrainer places the ranks of the same run on an existing Ray cluster."""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from shardwise.errors import RecipeError
from shardwise.launch.environment import variables
from shardwise.launch.targets.parts import RECIPE, Launched, Seen, comment, require_environment, shell

SCRIPT = "driver.py"
LOG = "driver.log"


def render(run: Launched) -> str:
    """The driver, a Python program: every value is a Python literal."""
    launch = run.recipe.launch
    if launch.preflight:
        raise RecipeError(
            "launch.preflight is not run on Ray",
            "Ray places the ranks itself, after the driver has started",
            "start shardwise doctor --nodes on the nodes, or leave it out",
        )
    fixed = "".join(f"    {v.name!r}: {v.value!r},  # {comment(v.reason)}\n" for v in variables(run.recipe))
    handed = "".join(f"    {name!r}: os.environ[{name!r}],\n" for name in launch.environment)
    handed = f"{{\n{handed}}}" if handed else "{}"
    gpu = launch.gpus is not None
    return f"""# Run {comment(run.name)} on {comment(run.size)}. Written by: shardwise launch --on ray
# Start it on a machine of the Ray cluster:  python {SCRIPT}
# All nodes must see the run folder, the model and the data under the same paths, and have shardwise installed.
# Ray's own ports have no login: use a private network.

import os
import sys
import time
from pathlib import Path

import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

from shardwise.errors import ShardwiseError
from shardwise.launch.ray_worker import rank
from shardwise.launch.wrapper import begin, end, tell

NAME = {run.name!r}
os.chdir({str(Path.cwd())!r})
# Variables of every rank.
ENVIRONMENT = {{
{fixed}}}
# Those whose values come from this shell. Ray writes a runtime_env into its logs: these travel as an object.
SECRETS = {handed}

RECIPE = Path({str(run.folder / RECIPE)!r})

try:  # model, rows and run folder, before a rank starts
    started = begin(RECIPE, NAME, owner=f"ray-{{NAME}}", attempt=str(time.time_ns()), lead=True)
except ShardwiseError as problem:
    print(problem, file=sys.stderr)
    tell(RECIPE, 0, problem.exit_code, problem.what)
    sys.exit(problem.exit_code)
ray.init(address={launch.ray.address!r}, runtime_env={{"env_vars": ENVIRONMENT}}, log_to_driver=True)
trainer = TorchTrainer(
    rank,
    train_loop_config={{
        "run": str(started.run.path.resolve()),
        "recipe": str(RECIPE),
        "ready": ray.util.get_node_ip_address(),  # the other nodes fetch the model and prepare rows themselves
        "directory": os.getcwd(),
        "environment": dict(started.environment),
        "secrets": [ray.put(SECRETS)],
    }},
    torch_config=TorchConfig(backend={"nccl" if gpu else "gloo"!r}),
    scaling_config=ScalingConfig(
        num_workers={run.nodes * run.ranks_per_node},
        use_gpu={gpu},
        resources_per_worker={{"CPU": {launch.ray.cpus_per_rank}{', "GPU": 1' if gpu else ""}}},
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


def submit(script: Path, run: Launched) -> str:
    """Start the driver in the background; returns its process id. Raises RecipeError for a variable not set."""
    require_environment(run, "the driver")
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
    return str(process.pid)


def look(job_id: str) -> Seen:
    """Whether the driver still runs on this machine."""
    pid = int(job_id)
    with suppress(ChildProcessError):  # our own child, which stays a zombie otherwise
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return Seen("ended", "the driver has ended", os.waitstatus_to_exitcode(status))
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return Seen("ended", "the driver has ended")
    except PermissionError:
        pass
    return Seen("running", f"driver is process {pid}")


def cancel(job_id: str, now: bool) -> None:
    """`now`: end the driver and with it the ranks. Otherwise the run's stop file does it."""
    if now:
        with suppress(ProcessLookupError):
            os.kill(int(job_id), signal.SIGKILL)


def command(script: Path) -> str:
    """The line that starts the driver by hand."""
    return f"{shell(sys.executable)} {shell(script)}"
