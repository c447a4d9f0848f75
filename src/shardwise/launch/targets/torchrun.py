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
    command += torchrun(run, f'"$head:{PORT}"', shell(run.name))
    exports = "\n".join(
        f"export {v.name}={shell(v.value)}  # {comment(v.reason)}" for v in variables(run.recipe)
    )
    setup = "\n".join(comment(line) for line in launch.setup)
    names = "".join(
        f'\n: "${{{name}:?set it before starting}}"' for name in launch.environment
    )  # fmt: skip
    return f"""#!/bin/bash
# Run {comment(run.name)} on {comment(run.size)}. Written by: shardwise launch --on torchrun
# Start it on every node, first node first:  HEAD=first-node bash {SCRIPT} NODE_NUMBER   (0 to {run.nodes - 1})
# A node that died may be started again with the same line: it rejoins, and the run goes on from its checkpoint.
# All nodes must see this folder, the run folder, the model and the data under the same paths. The rendezvous has
# no login: use a private network.
set -euo pipefail
node=${{1:?node number, 0 to {run.nodes - 1}}}
head=${{HEAD:?name or address of the first node}}{names}
cd {shell(Path.cwd())}
{exports}
{setup}
exec {continued(command)}
"""


def submit(script: Path, run: Launched) -> str:
    """Nothing is submitted: a person starts the lines. Always raises UsageError, which says them."""
    lines = "\n       ".join(f"HEAD=first-node bash {shell(script)} {node}" for node in range(run.nodes))
    raise UsageError(
        f"{script} is written; there is no scheduler to give it to",
        f"start one line on each node:\n       {lines}",
        f"follow it with: shardwise status {run.name}",
    )


def look(job_id: str) -> Seen:
    return Seen("unknown", "started by hand")


def cancel(job_id: str, now: bool) -> None:
    """The stop file in the run folder does it."""
