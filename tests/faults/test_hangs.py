"""A rank that lives and does not move: found, every rank's stack printed, the stuck one named."""

import re

import pytest
from faulty import PATIENCE, Ended, Train, record, same

from shardwise.runs.records import Fault, Resume


@pytest.mark.parametrize(("engine", "kind"), [("fsdp2", "freeze"), ("zero3", "sleep")], indirect=["engine"])
def test_a_stuck_rank_is_found_with_every_ranks_stack_and_the_run_goes_on(
    train: Train, engine: str, kind: str, undisturbed: Ended
) -> None:
    """SIGSTOP, and a rank that never comes back from Python; three median steps here are less than 10 s."""
    ended = train(f"stuck-{engine}", f"{kind}:1:8", engine=engine)
    assert ended.code == 0, ended.text[-3000:]
    told = r"rank 1 (is stopped \(SIGSTOP\)|hangs): no sign of life for ([\d.]+) s since step 8, backward"
    found = re.search(told, ended.text)
    assert found is not None, ended.text[-3000:]
    silence = float(found[2])
    record(f"hang-{engine}", {"kind": kind, "named_after_seconds": silence})
    assert silence < 10 * PATIENCE
    assert "--- rank 0" in ended.text and "--- rank 1 (stuck)" in ended.text
    assert ended.text.count("loop.py") >= 2  # both ranks' Python stacks
    fault = next(e for e in ended.run.events() if isinstance(e, Fault))
    assert fault.rank == 1
    resumed = [e.step for e in ended.run.events() if isinstance(e, Resume)]
    # a stopped rank is woken to write its stack, and may come some steps further before all are ended
    assert len(resumed) == 1 and resumed[0] in ((4,) if kind == "sleep" else (4, 8, 12))
    assert ended.losses == undisturbed.losses and same(ended.weights(), undisturbed.weights())
