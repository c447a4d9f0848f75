"""NaN in a loss, or in gradients alone: stopped before the update, named, nothing of it published."""

import math
import re

import pytest
from faulty import Train

from shardwise.runs.checkpoints import choose
from shardwise.runs.records import Step, Warned


@pytest.mark.parametrize("kind", ["nan", "nan_gradient"])
def test_what_is_not_finite_stops_within_the_step_naming_rank_and_rows(
    train: Train, engine: str, kind: str
) -> None:
    if (engine, kind) == ("zero3", "nan"):
        kind = "nan_gradient"  # the loss is looked at before any engine is asked; gradients are each engine's own
        pytest.skip("shown with gradients")
    ended = train(f"{kind}-{engine}", f"{kind}:1:7", engine=engine)
    assert ended.code == 1, ended.text[-2000:]
    what = "loss is nan" if kind == "nan" else "gradient norm is (?:nan|inf)"
    assert re.search(rf"step 7: {what} \(rank 1, rows \S*chat\.jsonl:\d+", ended.text), ended.text[-2000:]
    assert [s.step for s in ended.run.history(Step)][-1] == 6
    newest = choose(ended.run).checkpoint
    assert newest is not None and newest.step == 4  # save() looks at every element before it publishes
    assert all(math.isfinite(loss) for loss in ended.losses)
    assert not ended.run.model_path.exists()


def test_a_step_can_be_skipped_or_gone_back_behind(train: Train, engine: str) -> None:
    choice = {"fsdp2": "rollback", "zero3": "skip"}[engine]
    kind = {"fsdp2": "nan", "zero3": "nan_gradient"}[engine]
    settings = (f"training.non_finite={choice}",)
    ended = train(f"{choice}-{engine}", f"{kind}:1:7", engine=engine, settings=settings)
    assert ended.code == 0, ended.text[-2000:]
    steps = [s.step for s in ended.run.history(Step)]
    assert steps == [1, 2, 3, 4, 5, 6, 8, 9, 10, 11, 12]
    assert all(math.isfinite(loss) for loss in ended.losses)
    told = [e.message for e in ended.run.events() if isinstance(e, Warned)]
    assert any("step 7" in m and "(rank 1, rows" in m and "1 of at most 3" in m for m in told)
    assert any("back to the checkpoint of step 4" in m for m in told) == (choice == "rollback")
    summary = ended.run.summary()
    assert summary is not None and summary.model_dump()["skipped_steps"] == [7]
    assert "1 steps skipped" in " ".join(ended.text.split())
