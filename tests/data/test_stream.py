"""Streams: every row in its turn, the same whoever reads them and wherever they were interrupted, none in silence."""

import json
from collections import Counter
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_toys import chat, write_rows
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardwise.data import Prepared, prepare
from shardwise.data.batches import EncoderSpec
from shardwise.data.stream import Block, Lane, draws
from shardwise.data.stream_reader import StreamReader
from shardwise.errors import DataError, RecipeError
from shardwise.recipe import parse_recipe

Open = Callable[..., Prepared]
SIZE = 4  # sequences in a step


@pytest.fixture
def stream(toy: Path, tmp_path: Path) -> Open:
    """prepare() with data.streaming, over files named as sources."""

    def call(train: Any, **keys: Any) -> Prepared:
        tree = {"train": train, "streaming": True, "sequence_length": 128, "buffer_rows": 32} | keys
        recipe = parse_recipe(json.dumps({"model": "x", "data": tree, "training": {"max_steps": 10}}))
        return prepare(recipe.data, toy, cache=tmp_path / "cache", seed=3, vocabulary=400)

    return call


def some_rows(count: int, name: str) -> list[dict[str, Any]]:
    return [chat(f"{name}{i}", "x" * (i * 7 % 61 + 1)) for i in range(count)]


def reader(prepared: Prepared, rank: int = 0, world: int = 1, **more: Any) -> StreamReader:
    assert prepared.stream is not None
    return StreamReader(prepared.stream, SIZE, rank, world, **more)


def contents(found: list[tuple[Block, tuple[int, ...]]]) -> list[list[tuple[str, int, bytes]]]:
    """File, line and tokens of every row of every packed sequence."""
    return [[(*b.rows.source(i), b.rows.row(i)[0].tobytes()) for i in one] for b, one in found]


def steps_of(readers: list[StreamReader], steps: range) -> list[Any]:
    """Per step the sequences of all ranks, in the order of the step."""
    out = []
    for step in steps:
        shares = [contents(r.sequences(step)) for r in readers]
        world = len(readers)
        out.append([shares[j % world][j // world] for j in range(SIZE)])
    return out


def close(*readers: StreamReader) -> None:
    for one in readers:
        one.close()


def test_a_pass_has_every_row_once_over_disjoint_lanes(stream: Open, tmp_path: Path) -> None:
    files = tmp_path / "files"
    files.mkdir()
    for name, count in (("a", 70), ("b", 1), ("c", 57)):
        write_rows(files / f"{name}.jsonl", some_rows(count, name))
    prepared = stream(str(files))
    assert prepared.stream is not None
    seen: list[list[tuple[str, int]]] = []
    for lane in range(2):
        blocks = islice(
            Lane(prepared.stream, lane, 2, 1).blocks(Lane(prepared.stream, lane, 2, 1).beginning()), 2
        )
        rows = [block.rows.source(i) for block in blocks for one in block.bins for i in one]
        seen.append(rows)
        assert len(rows) == 64
    assert not set(seen[0]) & set(seen[1])
    assert Counter(seen[0] + seen[1]) == Counter(
        (str(files / f"{n}.jsonl"), i)
        for n, count in (("a", 70), ("b", 1), ("c", 57))
        for i in range(1, count + 1)
    )
    assert [line for _, line in seen[0]] != sorted(line for _, line in seen[0])


@pytest.mark.parametrize(
    ("world", "again", "workers"), [(2, 2, 1), (2, 1, 1), (1, 2, 1), (2, 4, 1), (1, 1, 2)]
)
def test_what_follows_an_interruption_is_what_would_have_come(
    stream: Open, tmp_path: Path, world: int, again: int, workers: int
) -> None:
    write_rows(tmp_path / "a.jsonl", [*some_rows(90, "a"), {"messages": []}])
    write_rows(tmp_path / "b.jsonl", some_rows(23, "b"))
    sources = [str(tmp_path / "a.jsonl"), {"path": str(tmp_path / "b.jsonl"), "weight": 0.4}]
    prepared = stream(sources)
    whole = [reader(prepared, rank, world) for rank in range(world)]
    expected = steps_of(whole, range(12))  # several passes of b and blocks of both lanes
    for cut in (0, 1, 7) if workers == 1 else (5,):
        first = [reader(prepared, rank, world) for rank in range(world)]
        steps_of(first, range(cut))
        places: dict[str, Any] = {}
        for one in first:
            places |= one.position(cut)
        position = json.loads(json.dumps({"lanes": world, "places": places}))  # as a checkpoint keeps it
        rest = [
            reader(stream(sources), rank, again, position=position, workers=1 if rank else workers)
            for rank in range(again)
        ]
        assert steps_of(rest, range(cut, 12)) == expected[cut:]
        close(*first, *rest)
    close(*whole)


def test_a_run_can_go_back_to_its_checkpoint(stream: Open, tmp_path: Path) -> None:
    write_rows(tmp_path / "a.jsonl", some_rows(90, "a"))
    one = reader(stream(str(tmp_path / "a.jsonl")))
    first = steps_of([one], range(14))
    one.position(14)
    assert steps_of([one], range(2, 3)) == first[2:3]  # while the first places are kept
    one.position(9)
    assert steps_of([one], range(9, 14)) == first[9:]
    close(one)


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(bad=st.lists(st.sampled_from(["row", "line", "long"]), max_size=12), steps=st.integers(1, 9))
def test_every_row_that_was_read_is_accounted_for(
    stream: Open, tmp_path: Path, bad: list[str], steps: int
) -> None:
    lines = [json.dumps(row) for row in some_rows(50, "a")]
    odd = {"row": '{"messages": []}', "line": '{"messages"', "long": json.dumps(chat("q" * 200, "a"))}
    for number, kind in enumerate(bad):
        lines.insert(3 * number + 1, odd[kind])
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    one = reader(stream(str(tmp_path / "a.jsonl"), overlong="drop"))
    used = steps_of([one], range(steps))
    account, count = one.account(steps)
    close(one)
    assert count == sum(len(sequence) for step in used for sequence in step)
    refused = sum(t.count for t in account.refused.values())
    dropped = sum(t.count for t in account.dropped.values())
    read = sum(account.rows_read.values())
    assert read % 32 == 0 and read >= count + refused + dropped
    if read >= len(lines):  # a whole pass at least
        assert refused >= bad.count("row") + bad.count("line") and dropped >= bad.count("long")


def test_sources_are_mixed_in_the_ratio_of_their_weights(stream: Open, tmp_path: Path) -> None:
    for chunk in range(3):
        assert Counter(draws((1.0, 3.0), 7, chunk)) == {0: 250, 1: 750}
    thirds = Counter(n for chunk in range(30) for n in draws((1.0, 1.0, 1.0), 7, chunk))
    assert all(abs(count - 10_000) <= 30 for count in thirds.values())
    write_rows(tmp_path / "a.jsonl", some_rows(300, "a"))
    write_rows(tmp_path / "b.jsonl", some_rows(5, "b"))
    prepared = stream(
        [str(tmp_path / "a.jsonl"), {"path": str(tmp_path / "b.jsonl"), "weight": 0.25}], buffer_rows=500
    )
    assert "as 1 : 0.25" in prepared.report.streamed
    assert prepared.stream is not None
    lane = Lane(prepared.stream, 0, 1, 1)
    block = next(lane.blocks(lane.beginning()))
    drawn = Counter(Path(block.rows.source(i)[0]).name for one in block.bins for i in one)
    assert drawn["a.jsonl"] + drawn["b.jsonl"] == 500 and 70 <= drawn["b.jsonl"] <= 130


def test_text_fills_its_sequences_with_an_end_token_between_documents(
    stream: Open, tmp_path: Path, tokenizer: Any
) -> None:
    write_rows(tmp_path / "t.jsonl", [{"text": "abc" * (i % 40 + 1)} for i in range(64)])
    prepared = stream(str(tmp_path / "t.jsonl"))
    assert prepared.stream is not None
    lane = Lane(prepared.stream, 0, 1, 1)
    for block in islice(lane.blocks(lane.beginning()), 2):
        sizes = sorted(int(block.rows.lengths[list(one)].sum()) for one in block.bins)
        assert sizes[1:] and all(size >= 127 for size in sizes[1:])  # all but the block's last
        trained = sum(int((block.rows.row(i)[1] != -100).sum()) for one in block.bins for i in one)
        assert trained == len(block.rows.store.tokens) - 32  # all but the first token of each document
        assert int((np.asarray(block.rows.store.tokens) == tokenizer.end).sum()) == 32


def test_other_kinds_of_files_are_streamed_too(stream: Open, tmp_path: Path) -> None:
    import gzip

    import pyarrow
    import pyarrow.parquet

    rows = some_rows(40, "p")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "p.parquet", row_group_size=16)
    with gzip.open(tmp_path / "g.jsonl.gz", "wt") as out:
        out.write("".join(json.dumps(row) + "\n" for row in rows))
    found = []
    for name in ("p.parquet", "g.jsonl.gz"):
        one = reader(stream(str(tmp_path / name)))
        steps_of([one], range(5))
        later = reader(stream(str(tmp_path / name)), position={"lanes": 1, "places": one.position(5)})
        found.append(steps_of([later], range(5, 8)))
        close(one, later)
    plain = [[[tokens for _, _, tokens in one] for one in step] for step in found[0]]
    assert plain == [[[tokens for _, _, tokens in one] for one in step] for step in found[1]]


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"overlong": "refuse"}, "overlong = refuse"),
        ({"validation": 10}, "validation = 10 with data.streaming"),
        ({"validation": 0.1}, "name a file"),
        ({"sequence_length": 0}, "sequence_length"),
    ],
)
def test_what_a_stream_cannot_do_is_refused(stream: Open, tmp_path: Path, keys: Any, said: str) -> None:
    write_rows(tmp_path / "a.jsonl", some_rows(9, "a"))
    with pytest.raises((DataError, RecipeError)) as refused:
        stream(str(tmp_path / "a.jsonl"), **keys)
    assert said in str(refused.value)


def test_a_stream_needs_an_end(tmp_path: Path) -> None:
    for training in ({}, {"epochs": 2.0}):
        with pytest.raises(RecipeError, match=r"needs training.max_steps or training.max_tokens"):
            parse_recipe(
                json.dumps({"model": "x", "data": {"train": "y", "streaming": True}, "training": training})
            )


def test_files_without_a_usable_row_are_refused_before_the_run(stream: Open, tmp_path: Path) -> None:
    write_rows(tmp_path / "a.jsonl", [{"messages": []}] * 5)
    with pytest.raises(DataError, match="none of 5 rows is usable"):
        stream(str(tmp_path / "a.jsonl"))


def test_rows_that_turn_bad_end_the_run_with_the_reason(stream: Open, tmp_path: Path) -> None:
    write_rows(tmp_path / "a.jsonl", [*some_rows(260, "a"), *[{"messages": []}] * 400])
    one = reader(stream(str(tmp_path / "a.jsonl")))
    with pytest.raises(DataError, match="96 rows in a row gave nothing") as refused:
        steps_of([one], range(100))
    assert "the conversation is empty" in refused.value.why
    close(one)


def test_tokens_without_an_embedding_are_met_during_the_run(stream: Open, toy: Path, tmp_path: Path) -> None:
    write_rows(tmp_path / "a.jsonl", some_rows(9, "a"))
    spec = stream(str(tmp_path / "a.jsonl")).stream
    assert spec is not None and isinstance(spec.encoder, EncoderSpec)
    from dataclasses import replace

    lane = Lane(replace(spec, vocabulary=100), 0, 1, 1)
    with pytest.raises(DataError, match="embedding has 100 rows"):
        next(lane.blocks(lane.beginning()))


def test_nothing_is_left_on_disk_and_held_out_rows_come_from_a_file(stream: Open, tmp_path: Path) -> None:
    write_rows(tmp_path / "a.jsonl", some_rows(90, "a"))
    write_rows(tmp_path / "h.jsonl", some_rows(7, "h"))
    one = reader(stream(str(tmp_path / "a.jsonl")))
    steps_of([one], range(10))
    close(one)
    assert not (tmp_path / "cache").exists()
    held = stream(str(tmp_path / "a.jsonl"), validation=str(tmp_path / "h.jsonl"))
    assert held.validation is not None and len(held.validation) == 7


def test_the_digest_tells_other_files_and_settings(stream: Open, tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", some_rows(30, "a"))
    found = {
        stream(str(path), **keys).cache_key
        for keys in ({}, {"buffer_rows": 33}, {"sequence_length": 64}, {"packing": False})
    }
    assert len(found) == 4 and stream(str(path)).cache_key in found
    write_rows(path, some_rows(31, "a"))
    assert stream(str(path)).cache_key not in found
