"""What every node of a launched run executes: make ready, start the launcher, turn the outcome into an exit code.

    python -m shardwise.launch.wrapper --recipe recipe.yaml --name NAME --owner JOB --attempt ID -- torchrun ...

Before the launcher starts, each node fetches the model and prepares the rows into its own cache, and node 0 makes
the run folder. Nodes wait for that, and for each other in the launcher's rendezvous: no rank starts before all are
ready.
Afterwards the records that the ranks left decide: 0 done, 1 failed, 2 refused, 75 stopped with the state saved.
torchrun itself exits 1 in the last three cases.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from shardwise.errors import Interrupted, RunError, ShardwiseError, UsageError
from shardwise.launch import operators, preflight
from shardwise.launch.cluster import decide_for, offer_of, open_folder, ranks_of_a_node, read_plan
from shardwise.launch.guard import guarded
from shardwise.launch.job import Job, add_estimate
from shardwise.launch.rank import ATTEMPT, RankEnd, log_path, rank_ends, stop_path
from shardwise.launch.targets.parts import JOIN_SECONDS, OUTCOME, PORT
from shardwise.recipe import load_recipe
from shardwise.runs import RunFolder
from shardwise.runs.changes import ACCEPT, accepted_of
from shardwise.runs.jsonfile import write_json

LATE_SECONDS = 15.0  # a shared file system may show another node's record later than its process ended
POLL_SECONDS = 0.2
# torch 2.13: with a shared store a node that joins a later round waits forever for an address that rank 0 wrote in
# the first one only (DynamicRendezvousHandler.next_rendezvous keeps _bootstrap_store_info).
LAUNCHER = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
# Where each scheduler says which node this is, the most specific first.
NODE_RANKS = ("SLURM_NODEID", "PET_NODE_RANK", "SKYPILOT_NODE_RANK", "JOB_COMPLETION_INDEX")


@dataclass(frozen=True)
class Started:
    """A run about to start on this node. `lead`: this node writes the run's status."""

    run: RunFolder
    job: Job
    environment: Mapping[str, str]
    attempt: str
    lead: bool
    recipe_path: Path


def main(arguments: Sequence[str]) -> int:
    """Parse, run, and print errors in three lines. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m shardwise.launch.wrapper")
    parser.add_argument("--recipe", type=Path, required=True, help="the recipe to run")
    parser.add_argument("--name", required=True, help="name of the run folder")
    parser.add_argument("--owner", required=True, help="the scheduler's name for this job")
    parser.add_argument("--attempt", required=True, help="the same on all nodes, new for every start")
    parser.add_argument("--node-rank", type=int, help="default: what the scheduler says, else 0")
    parser.add_argument(
        "--accept", action="append", default=[], help="a change since the last checkpoint that is wanted"
    )
    parser.add_argument("--directory", type=Path, help="where relative paths of the recipe start")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="-- and the launcher with its options")
    asked = parser.parse_args(arguments)
    command = asked.command[1:] if asked.command[:1] == ["--"] else asked.command
    node = node_rank(os.environ) if asked.node_rank is None else asked.node_rank
    if asked.accept:
        os.environ[ACCEPT] = ",".join([*accepted_of(os.environ), *asked.accept])
    try:
        if asked.directory is not None:
            os.chdir(asked.directory)
        code = run_node(asked.recipe, asked.name, asked.owner, asked.attempt, node, command)
    except ShardwiseError as problem:
        print(str(problem), file=sys.stderr, flush=True)
        code = problem.exit_code
        tell(asked.recipe, node, code, problem.what)
    return code


def run_node(
    recipe_path: Path, name: str, owner: str, attempt: str, node: int, command: Sequence[str]
) -> int:
    """Everything one node does. Returns the exit code; raises the UsageError family before a rank has started."""
    started = begin(recipe_path, name, owner, attempt, lead=node == 0)
    if started.job.recipe.launch.preflight:
        try:
            look_at_links(started, node, command)
        except RunError as problem:
            print(str(problem), file=sys.stderr, flush=True)
            return finish(started, problem.exit_code, problem.what)
    return end(started, launch(command, started, node))


def tell(recipe_path: Path, node: int, code: int, reason: str) -> None:
    """Leave the outcome beside the recipe, for the machine that launched it: a refused run has no folder."""
    if node == 0:
        with suppress(OSError):  # a ConfigMap is read-only: Kubernetes tells the code itself
            write_json(recipe_path.with_name(OUTCOME), {"exit_code": code, "reason": reason})


def look_at_links(started: Started, node: int, command: Sequence[str]) -> None:
    """`launch.preflight`: every rank must answer; what is slow becomes a warning of the run. Raises RunError."""
    head, port = rendezvous(command, os.environ)
    nodes, per_node = started.job.recipe.launch.nodes, ranks_of_a_node(started.job)
    where = preflight.Where(nodes, node, per_node, head, port + preflight.PORT_OFFSET)
    measured = preflight.measure(where, started.environment)
    if measured:
        tell_links(started, where, measured)


def tell_links(started: Started, where: preflight.Where, measured: Mapping[str, Any]) -> None:
    """Say what was measured, keep it in the run folder, and make warnings of what is slow."""
    run = started.run
    found = preflight.judge(measured, preflight.assumption(offer_of(started.job.recipe), where))
    print(preflight.as_text(found), file=sys.stderr, flush=True)
    run.logs_path.mkdir(exist_ok=True)
    write_json(run.logs_path / "links.json", dict(measured))
    for one in found.slow:
        run.event("warning", message=f"preflight: {one}")


def rendezvous(command: Sequence[str], environment: Mapping[str, str]) -> tuple[str, int]:
    """Where the ranks meet: the launcher's own option, or what a Kubeflow Trainer sets."""
    for word in command:
        if word.startswith("--rdzv-endpoint="):
            host, _, port = word.partition("=")[2].rpartition(":")
            return host, int(port)
    return environment.get("PET_MASTER_ADDR", "127.0.0.1"), int(environment.get("PET_MASTER_PORT", PORT))


def node_rank(environment: Mapping[str, str]) -> int:
    """This node's number as its scheduler tells it; 0 where none does."""
    return next((int(environment[name]) for name in NODE_RANKS if environment.get(name)), 0)


def begin(recipe_path: Path, name: str, owner: str, attempt: str, lead: bool) -> Started:
    """Model, rows, compiled operators and, on the lead, the run folder. Raises the UsageError family."""
    recipe = load_recipe(recipe_path)
    _say(f"reading {recipe.model.source} and preparing rows")
    job = decide_for(recipe, offer_of(recipe), here=True)
    environment = operators.ready(job.recipe, _say)
    if lead:
        with suppress(OSError):
            recipe_path.with_name(OUTCOME).unlink(missing_ok=True)
        run = open_folder(job, name, read_plan(recipe_path.with_name("plan.json")), owner)
        stop_path(run).unlink(missing_ok=True)
        outcome_path(run, attempt).unlink(missing_ok=True)
        for record in run.logs_path.glob("end-*.json"):  # an earlier start may have had this attempt's name
            record.unlink()
    else:
        run = RunFolder(Path(job.recipe.run.folder) / name)
        _wait_for(run)
    return Started(run, job, {**environment, ATTEMPT: attempt}, attempt, lead, recipe_path)


def _wait_for(run: RunFolder) -> None:
    """Until the lead has made the run folder. Raises RunError when it does not."""
    deadline = time.monotonic() + JOIN_SECONDS
    while not run.status_path.is_file():
        if time.monotonic() > deadline:
            raise RunError(
                f"{run.path} has not appeared on this node",
                f"waited {JOIN_SECONDS} s for the first node to make it",
                "is it on a file system that all nodes see? read the first node's log",
            )
        time.sleep(1.0)


def outcome_path(run: RunFolder, attempt: str) -> Path:
    """One number: the exit code of one attempt, for scripts whose scheduler loses it."""
    return run.logs_path / f"outcome-{attempt}"


def launch(command: Sequence[str], started: Started, node: int) -> int:
    """Run the launcher; it dies with this process, and requests to stop are passed on once.

    What the launcher writes goes to logs/launcher-NODE.log: torchrun ends even a good stop with a page of
    traceback. The lead shows what rank 0 writes instead.
    """
    started.run.logs_path.mkdir(exist_ok=True)
    with (started.run.logs_path / f"launcher-{node}.log").open("ab") as log:
        process = subprocess.Popen(
            guarded(_absolute(command)),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={
                **os.environ,
                **started.environment,
                **LAUNCHER,
                "TORCH_FR_DUMP_TEMP_FILE": str(started.run.logs_path.resolve() / "flight-"),  # and the rank
            },
        )
    asked = False

    def on_signal(_: int, __: FrameType | None) -> None:
        nonlocal asked
        if not asked:  # torchrun takes a second one as "at once"
            asked = True
            with suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, on_signal)
    shown = log_path(started.run, 0)
    offset = _size(shown)
    while process.poll() is None:
        time.sleep(POLL_SECONDS)
        offset = _show(shown, offset) if started.lead else offset
    if started.lead:
        _show(shown, offset)
    return process.returncode


def _show(path: Path, offset: int) -> int:
    """Copy what a log holds beyond `offset` to standard error; returns where it ends now."""
    try:
        with path.open("rb") as file:
            file.seek(offset)
            new = file.read()
    except OSError:
        return offset
    with suppress(OSError):  # a closed terminal does not end a run
        sys.stderr.buffer.write(new)
        sys.stderr.buffer.flush()
    return offset + len(new)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def end(started: Started, launcher_code: int) -> int:
    """Read how the ranks ended; on the lead, write it down and let the folder go. Returns the exit code."""
    run = started.run
    ends = _ends(run, started.attempt, launcher_code)
    return finish(started, *outcome(ends, launcher_code, bool(run.checkpoints())))


def finish(started: Started, code: int, reason: str) -> int:
    """On the lead, write the outcome down and let the folder go. Returns the code."""
    run = started.run
    if not started.lead:
        return code
    tell(started.recipe_path, 0, code, reason)
    try:
        if code == UsageError.exit_code:
            run.discard()
            return code
        state = {0: "done", Interrupted.exit_code: "interrupted"}.get(code, "failed")
        if code == 0:
            add_estimate(run, started.job.plan)
        run.status(state, reason, code)  # type: ignore[arg-type]
        run.event("end", state=state, reason=reason)
        outcome_path(run, started.attempt).write_text(f"{code}\n")
        _say(f"run {run.name} is {state}" + (f": {reason}" if reason else ""))
        return code
    finally:
        with suppress(OSError):
            run.release()


def outcome(ends: Sequence[RankEnd], launcher_code: int, has_checkpoint: bool) -> tuple[int, str]:
    """(exit code, reason) of one attempt from its ranks' records."""
    codes = {e.exit_code for e in ends}
    whole = bool(ends) and len(ends) == ends[0].world_size
    if launcher_code == 0 and whole and codes == {0}:
        return 0, ""
    if whole and Interrupted.exit_code in codes and codes <= {0, Interrupted.exit_code}:
        saved = "state saved" if has_checkpoint else "before anything was saved"
        return Interrupted.exit_code, f"stopped on request, {saved}"
    failed = [e for e in ends if e.exit_code not in (0, Interrupted.exit_code)]
    if failed and {e.exit_code for e in failed} == {UsageError.exit_code} and not has_checkpoint:
        return UsageError.exit_code, failed[0].reason
    if not failed:
        return 1, f"the launcher ended with exit code {launcher_code} and not all ranks told how they ended"
    first = min(failed, key=lambda e: (e.echo, e.time))
    return 1, f"rank {first.rank} on {first.host}: {first.reason or f'exit code {first.exit_code}'}"


def _ends(run: RunFolder, attempt: str, launcher_code: int) -> list[RankEnd]:
    """The records of all ranks, waited for where the launcher failed."""
    deadline = time.monotonic() + LATE_SECONDS
    while True:
        ends = rank_ends(run, attempt)
        if (ends and len(ends) == ends[0].world_size) or time.monotonic() > deadline:
            return ends
        if launcher_code < 0:  # killed: nobody is left to write
            return ends
        time.sleep(0.2)


def _absolute(command: Sequence[str]) -> list[str]:
    """`torchrun` is found beside the Python that runs this, so that a PATH cannot choose another one."""
    if command[:1] == ["torchrun"]:
        return [sys.executable, "-m", "torch.distributed.run", *command[1:]]
    return list(command)


def _say(text: str) -> None:
    print(f"shardwise: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
