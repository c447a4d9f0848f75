"""A rank that starts before its run is decided: it imports torch while rows are prepared and the plan is made.

Only where one rank on this machine is to be expected; with several, each imports as soon as it is started.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from shardwise.facts.machine import Machine, detect_machine
from shardwise.launch.guard import guarded
from shardwise.launch.precision import to_be_measured
from shardwise.launch.terminal import Channel, open_channel
from shardwise.recipe import Recipe

RANK = [sys.executable, "-m", "shardwise.training"]  # and a run's folder, or --wait for being told
# How often torch's OpenMP threads ask for each other before they sleep. The library's own 300,000 times keep a core
# from the very thread that is waited for, where other programs run: a step then takes many times as long. So few cost
# nothing that could be measured where none do (two cores, steps of 1 to 3 s; 1,000 cost 3 %).
SPINS = "4000"


def rank_environment(given: Mapping[str, str]) -> dict[str, str]:
    """What a rank's process starts with. What a person has set stays."""
    ours = {"PYTHONUNBUFFERED": "1"}
    if "OMP_WAIT_POLICY" not in given and "GOMP_SPINCOUNT" not in given:
        ours["GOMP_SPINCOUNT"] = SPINS
    return {**given, **ours}


def spawn(
    command: Sequence[str], channel: Channel, environment: Mapping[str, str], stdin: int = subprocess.DEVNULL
) -> "subprocess.Popen[bytes]":
    """Start a rank that cannot outlive this process and speaks into `channel`, which is closed if it cannot start."""
    try:
        process = subprocess.Popen(
            guarded(list(command)),
            stdin=stdin,
            stdout=channel.write_end,
            stderr=channel.write_end,
            env=environment,
            start_new_session=True,  # a process group to end, and Ctrl-C reaches the launcher alone
        )
    except BaseException:
        channel.close()
        raise
    channel.started()
    return process


class Ahead:
    """At most one waiting rank. A context, at whose end none waits any more."""

    def __init__(self, recipe: Recipe) -> None:
        self._waiting: tuple[subprocess.Popen[bytes], Channel] | None = None
        machine = detect_machine()
        one = _one_rank(recipe, machine) and not to_be_measured(recipe, machine)
        if not one or find_spec("torch") is None:
            return
        channel = open_channel(None, echo=True, output=None)
        process = spawn([*RANK, "--wait"], channel, rank_environment(os.environ), subprocess.PIPE)
        self._waiting = process, channel

    def take(
        self, command: Sequence[str], environment: Mapping[str, str], log: Path
    ) -> tuple[subprocess.Popen[bytes], Channel] | None:
        """Have the waiting rank do `command` under `environment`; None where there is none, or for another program.

        What it has said so far, the reason for its end too, comes to `log` and the terminal as of any rank.
        """
        if self._waiting is None or list(command[: len(RANK)]) != RANK:
            return None
        (process, channel), self._waiting = self._waiting, None
        channel.keep(log)
        told = {"arguments": command[len(RANK) :], "environment": dict(environment)}
        try:
            assert process.stdin is not None
            process.stdin.write(json.dumps(told).encode() + b"\n")
            process.stdin.close()
        except BrokenPipeError:
            pass  # it has ended, and how is seen as of any rank
        return process, channel

    def __enter__(self) -> "Ahead":
        return self

    def __exit__(self, *_: object) -> None:
        if self._waiting is None:
            return
        process, channel = self._waiting
        self._waiting = None
        process.kill()
        process.communicate()
        channel.close()


def _one_rank(recipe: Recipe, machine: Machine) -> bool:
    """Whether this recipe will be run by one rank, as far as it tells."""
    engine = recipe.engine
    if engine.name not in ("auto", "single"):
        return False
    return engine.processes == 1 or (engine.processes == "auto" and len(machine.gpus) < 2)
