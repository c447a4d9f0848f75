"""torchrun by hand: the exact line for each node."""

import sys
from pathlib import Path

from shardwise.errors import UsageError
from shardwise.launch.environment import variables
from shardwise.launch.targets.parts import (
    PORT,
    RECIPE,
    Launched,
    Seen,
    comment,
    continued,
    shell,
    torchrun,
    wrapper,
)

SCRIPT = "node.sh"


def render(run: Launched) -> str:
    """A script that each node runs with its own number: `bash node.sh 0` on the first, and so on."""
    launch = run.recipe.launch
    python = shell(launch.python or sys.executable)
    command = wrapper(
        run, python, shell(run.folder / RECIPE), shell(run.name), shell(run.name), '--node-rank "$node"'
    )
    command += torchrun(run, '"$head:$port"', shell(run.name), "$((node == 0))")
    exports = [f"export {v.name}={shell(v.value)}  # {comment(v.reason)}" for v in variables(run.recipe)]
    before = "".join(f"{line}\n" for line in [*exports, *map(comment, launch.setup)])
    names = "".join(
        f'\n: "${{{name}:?set it before starting}}"' for name in launch.environment
    )  # fmt: skip
    numbers = "0" if run.nodes == 1 else f"0 to {run.nodes - 1}"
    return f"""#!/bin/bash
# Run {comment(run.name)} on {comment(run.size)}. Written by: shardwise launch --on torchrun
# Start it on every node, first node first:  HEAD=first-node bash {SCRIPT} NODE_NUMBER   ({numbers})
# A node that died may be started again with the same line: it rejoins, and the run goes on from its checkpoint.
# When the first node dies, which keeps the rendezvous, start all of them again.
# All nodes must see this folder, the run folder, the model and the data under the same paths. The rendezvous has
# no login: use a private network.
set -euo pipefail
node=${{1:?node number, {numbers}}}
head=${{HEAD:?name or address of the first node}}
port=${{PORT:-{PORT}}}{names}
cd {shell(Path.cwd())}
{before}exec {continued(command)}
"""


def submit(script: Path, run: Launched) -> str:
    """Nothing is submitted: a person starts `lines`."""
    return "by hand"


def lines(script: Path, run: Launched) -> list[str]:
    """What to start on each node, first node first."""
    return [f"HEAD=first-node bash {shell(script)} {node}" for node in range(run.nodes)]


def look(job_id: str) -> Seen:
    return Seen("unknown", "started by hand")


def cancel(job_id: str, now: bool) -> None:
    """The stop file in the run folder does it. Raises UsageError for `now`: nobody here knows the processes."""
    if now:
        raise UsageError(
            "a run on torchrun cannot be ended at once from here",
            "its nodes were started by hand",
            "press Ctrl-C there; without --now, the run saves and stops",
        )
