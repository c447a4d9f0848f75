"""A streamed run on two ranks, and the same run taken up again in the middle."""

import json
import shutil
from pathlib import Path
from typing import Any

from data_toys import chat, write_rows

from shardwise.launch.job import decide, execute
from shardwise.recipe import parse_recipe
from shardwise.runs import RunFolder, open_run


def losses(run: RunFolder) -> list[tuple[int, float, int, int]]:
    found = [e.model_dump() for e in run.events("step")]
    return [(e["step"], e["loss"], e["tokens"], e["trained_tokens"]) for e in found]


def test_a_resumed_stream_is_the_uninterrupted_one_on_two_ranks(
    tiny_model: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path / "cache"))
    rows = [chat(f"question {i}", "answer " * (i % 13 + 1)) for i in range(40)]
    write_rows(tmp_path / "a.jsonl", [*rows, {"messages": []}])
    with (tmp_path / "a.jsonl").open("a") as out:
        out.write("{broken\n")
    tree = {
        "model": str(tiny_model),
        "method": "full",
        "data": {
            "train": str(tmp_path / "a.jsonl"),
            "streaming": True,
            "buffer_rows": 11,
            "sequence_length": 256,
        },
        "training": {"max_steps": 6, "global_batch_size": 4, "micro_batch_size": 1},
        "engine": {"name": "ddp", "device": "cpu", "processes": 2},
        "checkpoint": {"every_steps": 3},
        "evaluation": {"every_steps": 0},
        "run": {"folder": str(tmp_path / "runs"), "name": "whole"},
    }
    recipe = parse_recipe(json.dumps(tree))
    whole = execute(decide(recipe), {})
    summary = whole.summary()
    assert summary is not None
    told = summary.model_dump()["streamed"]
    assert told["read"] == told["used"] + told["refused"] + told["dropped"] + told["waiting"]
    assert told["used"] > 40 and told["refused"] >= 2 and told["waiting"] >= 0  # a second pass was begun
    assert any("cannot be read" in reason for reason in told["reasons"])

    shutil.copytree(tmp_path / "runs" / "whole", tmp_path / "runs" / "cut")
    shutil.rmtree(tmp_path / "runs" / "cut" / "checkpoints" / "step-00000006")
    cut = open_run("cut", str(tmp_path / "runs"))
    again = execute(decide(parse_recipe(cut.recipe_text())), {}, cut)
    steps = losses(again)
    assert steps[:6] == losses(whole) and steps[6:] == losses(whole)[3:]
    after = again.summary()
    assert after is not None and after.model_dump()["streamed"] == told
