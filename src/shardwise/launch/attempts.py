"""Start the ranks, and start them again when one was killed or hung: a run needs no person to go on."""

import sys
from collections.abc import Mapping

from shardwise.launch.ahead import RANK, Ahead
from shardwise.launch.local import Outcome, start
from shardwise.recipe import Recipe
from shardwise.runs import RunFolder
from shardwise.runs.checkpoints import choose, pass_over

RESUME_STEP = "SHARDWISE_RESUME_STEP"  # environment: the step whose checkpoint has been verified


def attempts(
    run: RunFolder,
    recipe: Recipe,
    environment: Mapping[str, str],
    step: int | None,
    ahead: Ahead | None = None,
) -> Outcome:
    """Run the ranks to their end, from the checkpoint of `step` or from the beginning (None).

    A rank that waits `ahead` is the first one of the first attempt.

    A rank that was killed by a signal or hung is no fault of the recipe: the ranks go on from the newest good
    checkpoint, or begin again without one, at most `checkpoint.restarts` times without a newer checkpoint. A
    failure of their own making (an error, no memory, no disk, a refusal) would only repeat itself.
    """
    processes = recipe.engine.processes
    assert processes != "auto"
    left = recipe.checkpoint.restarts
    while True:
        command = [*RANK, str(run.path)]
        ours = {**environment}
        if step is not None:
            command.append("--resume")
            ours[RESUME_STEP] = str(step)
        outcome = start(command, processes, run.logs_path, ours, ahead=ahead)
        failure = outcome.failure
        by_chance = failure is not None and not failure.out_of_memory and (failure.hung or failure.signal)
        if not by_chance or outcome.stop_asked:
            return outcome
        assert failure is not None
        choice = choose(run)
        newest = choice.checkpoint
        if newest is not None and newest.step > (step or 0):
            left = recipe.checkpoint.restarts
        if left == 0:
            return outcome
        left -= 1
        step = newest.step if newest is not None else None
        where = f"from the checkpoint of step {step}" if step is not None else "from the beginning"
        run.event(
            "fault",
            time=failure.noticed_unix_seconds,
            rank=failure.rank,
            reason=failure.reason,
            silent_seconds=failure.silent_seconds,
        )
        tell(run, f"{failure.reason}; going on {where} ({left} more tries without a new checkpoint)")
        for words in pass_over(choice.skipped, where):
            tell(run, words)
        if step is None:
            run.event("resume", step=0)


def tell(run: RunFolder, message: str) -> None:
    """Say something on the terminal and in the run's record."""
    print(f"warning: {message}", file=sys.stderr, flush=True)
    run.event("warning", message=message)
