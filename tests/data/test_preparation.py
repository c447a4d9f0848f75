"""Preparation: cached by everything that changes tokens, goes on after a break, loses no row and no token."""

import json
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_toys import SMOL, chat, make_tokenizer, trained_text, whole_text, write_rows
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardwise.data import Prepared, build, make_order, prepare
from shardwise.data.tokenizer import Tokenizer
from shardwise.errors import DataError, ModelError

Run = Callable[..., Prepared]


def test_rows_read_are_rows_used_and_refused(run: Run, tmp_path: Path) -> None:
    rows = (
        [chat(f"q{i}", "a" * (i % 50 + 1)) for i in range(60)]
        + [{"messages": []}] * 3
        + [chat("q" * 300, "a")]
    )
    report = run(rows, validation=7, sequence_length=128, overlong="drop").report
    assert report.rows_read == 64 and report.rows_refused == 3 and report.rows_dropped == 1
    assert report.rows_train + report.rows_validation == 60 and report.rows_validation == 7
    assert json.loads(json.dumps(report.to_dict()))["rows_refused"] == 3


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    kinds=st.lists(
        st.sampled_from(["chat", "bad", "long", "text", "longtext", "empty"]), min_size=3, max_size=25
    ),
    held=st.sampled_from([0, 1, 0.3]),
    overlong=st.sampled_from(["truncate", "drop"]),
)
def test_no_row_is_lost_in_silence(
    run: Run, tmp_path: Path, kinds: list[str], held: float, overlong: str
) -> None:
    made = {
        "chat": lambda i: chat(f"q{i}", "a" * (i % 9 + 1)),
        "bad": lambda i: {"messages": []},
        "long": lambda i: chat("q" * 200, f"a{i}"),
        "text": lambda i: {"text": f"text {i}"},
        "longtext": lambda i: {"text": f"text {i} " * 40},
        "empty": lambda i: {"text": " "},
    }
    kinds = [*kinds, "chat", "text", "text"]
    sources = []
    for name, fields in (("chats", ("chat", "bad", "long")), ("texts", ("text", "longtext", "empty"))):
        rows = [made[kind](i) for i, kind in enumerate(kinds) if kind in fields]
        path = write_rows(tmp_path / f"{name}.jsonl", rows)
        sources.append({"path": str(path), "format": "messages" if name == "chats" else "text"})
    report = run(sources, validation=held, sequence_length=128, overlong=overlong).report
    assert report.rows_read == len(kinds)
    used = report.rows_train + report.rows_validation
    assert report.rows_read == used + report.rows_refused + report.rows_dropped
    assert sum(f.rows_refused for f in report.files) == report.rows_refused
    assert report.ended <= report.rows_train - report.documents_train


def test_the_second_preparation_reads_only_the_index(run: Run, tmp_path: Path, monkeypatch: Any) -> None:
    path = write_rows(tmp_path / "a.jsonl", [chat(f"q{i}", f"a{i}") for i in range(30)])
    first = run(str(path))
    monkeypatch.setattr("shardwise.data.tokenizer.load_tokenizer", lambda *a, **k: 1 / 0)
    second = run(str(path))
    assert first.cache_key == second.cache_key and first.report == second.report
    assert all((first.train.row(i)[1] == second.train.row(i)[1]).all() for i in range(30))
    view = run(str(path), sequence_length=90, validation=3)  # made without a token being written
    assert view.sequence_length == 90 and view.report.rows_train == 27


def test_the_key_covers_what_changes_tokens(run: Run, tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", [chat("q", "a")])
    other = make_tokenizer(tmp_path / "other", SMOL.replace("helpful", "kind"))
    keys = [
        run(str(path)).cache_key,
        run(str(path), train_on="all").cache_key,
        run(str(path), template="qwen").cache_key,
        run(str(path), model=other).cache_key,
        run([{"path": str(path), "format": "messages"}]).cache_key,
    ]
    assert len(set(keys[:4])) == 4 and keys[4] == keys[0]
    path.write_text(path.read_text().replace('"q"', '"r"'))
    assert run(str(path)).cache_key != keys[0]


def test_a_preparation_that_broke_off_goes_on_where_it_stopped(
    run: Run, tmp_path: Path, monkeypatch: Any
) -> None:
    files = tmp_path / "files"
    files.mkdir()
    for name in "abc":
        rows = [chat(f"{name}{i}", "ä" * (i % 7 + 1)) for i in range(40)] + [{"messages": []}]
        write_rows(files / f"{name}.jsonl", rows)
    whole = run(str(files), cache=tmp_path / "whole")
    monkeypatch.setattr(build, "BATCH", 16)
    monkeypatch.setattr(build, "JOURNAL_SECONDS", 0.0)
    encoded: list[int] = []

    def stop_at(rows: int) -> Callable[[str, int, int | None], None]:
        def progress(phase: str, done: int, total: int | None) -> None:
            encoded.append(done)
            assert total == 123
            if done >= rows:
                raise KeyboardInterrupt

        return progress

    for rows in (16, 57, 100):
        with pytest.raises(KeyboardInterrupt):
            run(str(files), cache=tmp_path / "cut", progress=stop_at(rows))
    resumed = run(str(files), cache=tmp_path / "cut", progress=stop_at(10**9))
    assert resumed.report == whole.report and resumed.report.rows_refused == 3
    assert len(encoded) < 3 * 9  # four attempts that each began at the start would take more batches
    for i in range(len(whole.train)):
        assert resumed.train.source(i) == whole.train.source(i)
        for a, b in zip(resumed.train.row(i), whole.train.row(i), strict=True):
            assert (a == b).all()


def test_damaged_files_are_noticed(run: Run, tmp_path: Path, monkeypatch: Any) -> None:
    path = write_rows(tmp_path / "a.jsonl", [chat(f"q{i}", "a") for i in range(40)])
    whole = run(str(path))
    tokens = whole.train.store.folder / "tokens.bin"
    with tokens.open("r+b") as file:
        file.truncate(100)
    with pytest.raises(DataError, match="are damaged"):
        run(str(path))
    monkeypatch.setattr(build, "BATCH", 16)
    monkeypatch.setattr(build, "JOURNAL_SECONDS", 0.0)

    def stop(phase: str, done: int, total: int | None) -> None:
        if done >= 32:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(str(path), cache=tmp_path / "cut", progress=stop)
    [part] = (tmp_path / "cut" / "data").glob("*.partial")
    with (part / "marks.bin").open("r+b") as file:
        file.truncate(3)
    assert run(str(path), cache=tmp_path / "cut").report == whole.report


def test_two_processes_make_the_same_rows_as_one(run: Run, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(build, "BATCH", 8)
    path = write_rows(
        tmp_path / "a.jsonl", [chat(f"q{i}", "é" * (i % 5 + 1)) for i in range(50)] + [{}, chat("q")]
    )
    one = run([{"path": str(path), "format": "messages"}], cache=tmp_path / "one")
    monkeypatch.setenv("SHARDWISE_WORKERS", "2")
    two = run([{"path": str(path), "format": "messages"}], cache=tmp_path / "two")
    assert two.report == one.report and two.report.rows_refused == 2
    for name in ("tokens.bin", "marks.bin", "rows.bin"):
        files = [p.train.store.folder / name for p in (one, two)]
        assert files[0] != files[1] and files[0].read_bytes() == files[1].read_bytes()


def test_text_becomes_full_sequences_and_no_token_is_lost(
    run: Run, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    texts = {f"{i}.txt": "".join(chr(97 + (i * 7 + j) % 26) for j in range(20 + 37 * i)) for i in range(9)}
    for name, text in texts.items():
        (tmp_path / "docs").mkdir(exist_ok=True)
        (tmp_path / "docs" / name).write_text(text)
    prepared = run(str(tmp_path / "docs"), sequence_length=64)
    rows = prepared.train
    sizes = np.bincount(rows.groups, weights=rows.lengths)
    assert (sizes[:-1] >= 63).all() and 0 < sizes[
        -1
    ] <= 64  # 63: a document's first token alone teaches nothing
    trained = sum(int((rows.row(i)[1] != -100).sum()) for i in range(len(rows)))
    tokens = len(rows.store.tokens)
    assert trained == int(rows.trained.sum()) == tokens - len(texts)  # all but the first of each document
    assert prepared.report.documents == 9 and prepared.report.rows_train == 9
    pieces: dict[int, str] = {}
    for i in range(len(rows)):
        ids, labels = rows.row(i)
        base = int(rows.base[i])
        seen = ids[1:] if rows.starts[i] else ids  # a piece that goes on repeats one token as context
        assert labels[0] == -100 and (labels[1:] == ids[1:]).all()
        pieces[base] = pieces.get(base, "") + tokenizer.text_of(seen.tolist())
    assert sorted(pieces.values()) == sorted(t + "<|im_end|>" for t in texts.values())
    order = make_order(rows, sequence_length=64, packing=True, global_batch_size=2, epochs=1)
    seen_rows = sorted(i for s in range(order.steps) for one in order.step(s) for i in one)
    assert seen_rows == list(range(len(rows))) and order.efficiency > 0.9
    held = run(str(tmp_path / "docs"), sequence_length=64, validation=3)
    assert held.validation is not None and len(np.unique(held.validation.groups)) == 3
    assert not set(np.unique(held.validation.groups)) & set(np.unique(held.train.groups))


def test_a_long_text_file_read_in_parts_keeps_every_character(
    run: Run, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr("shardwise.data.readers.TEXT_CHARACTERS", 50)
    text = "".join(f"line {i}\n" for i in range(40))
    (tmp_path / "long.txt").write_text(text)
    prepared = run(str(tmp_path / "long.txt"), sequence_length=2048)
    store = prepared.train.store
    assert len(store.tokens) == len(text) + 1  # one byte, one token; one end token


def test_overlong_rows_are_cut_dropped_or_refused(run: Run) -> None:
    rows = [chat("q", "a" * 10), chat("q", "b" * 400)]
    cut = run(rows, sequence_length=200)
    assert cut.report.truncated == 1 and cut.train.lengths.tolist()[1] == 200
    assert int((cut.train.row(1)[1] != -100).sum()) == cut.train.trained[1]
    dropped = run(rows, sequence_length=200, overlong="drop").report
    assert dropped.rows_train == 1 and dropped.dropped[0].reason == "longer than sequence_length 200"
    with pytest.raises(DataError, match="1 of 2 rows are longer than sequence_length 200"):
        run(rows, sequence_length=200, overlong="refuse")


def test_the_sequence_length_fits_the_longest_row_or_the_model(run: Run) -> None:
    rows = [chat("q", "a" * 300)]
    assert run(rows).sequence_length % 64 == 0 and run(rows).report.truncated == 0
    assert run(rows, max_length=128).sequence_length == 128
    with pytest.raises(DataError, match="built for 128 positions"):
        run(rows, max_length=128, sequence_length=256)


def test_held_out_rows_are_not_trained_on(run: Run, tmp_path: Path) -> None:
    rows = [chat(f"q{i}", "a") for i in range(30)] + [chat("q1", "a")] * 30
    prepared = run(rows, validation=10)
    assert prepared.report.overlap == 0 and prepared.report.rows_validation == 10
    assert prepared.report.duplicates == 30
    again = run(rows, validation=10)
    assert again.validation is not None and prepared.validation is not None
    assert again.validation.base.tolist() == prepared.validation.base.tolist()
    write_rows(tmp_path / "held.jsonl", rows[:5])
    from_file = run(rows, validation=str(tmp_path / "held.jsonl"))
    assert from_file.report.overlap == 5 and from_file.report.rows_validation == 5


def test_the_end_of_a_row_is_there_for_every_rank(run: Run, tokenizer: Tokenizer) -> None:
    prepared = run([chat("q", "a")])
    assert whole_text(prepared, 0, tokenizer).endswith("a<|im_end|>\n")
    assert trained_text(prepared, 0, tokenizer) == "a<|im_end|>"
    names = sorted(p.name for p in prepared.train.store.folder.iterdir())
    assert names == ["done.json", "marks.bin", "rows.bin", "template.json", "tokens.bin"]
    for path in prepared.train.store.folder.iterdir():  # flat numbers and JSON: nothing to execute
        with pytest.raises(Exception):  # noqa: B017
            pickle.loads(path.read_bytes())


def test_models_without_tokenizer_or_template_and_unwritable_caches(run: Run, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match="has no tokenizer"):
        run([chat("q", "a")], model=tmp_path / "empty")
    bare = make_tokenizer(tmp_path / "bare", template=None)
    with pytest.raises(DataError, match="has no chat template"):
        run([chat("q", "a")], model=bare)
    assert run([{"prompt": "q", "completion": "a"}], model=bare).report.rows_train == 1
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot be kept"):
        run([chat("q", "a")], cache=tmp_path / "file")


def test_prepare_is_the_documented_door() -> None:
    assert prepare.__module__ == "shardwise.data.preparation"


def test_a_large_file_is_read_once_for_its_key_and_again_when_it_changed(
    run: Run, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(build, "LARGE_BYTES", 1)
    path = write_rows(tmp_path / "a.jsonl", [chat("q", "a")])
    young = run(str(path)).cache_key
    assert not (tmp_path / "cache" / "data" / "files").exists()  # it may still be written
    os.utime(path, (1_000_000, 1_000_000))
    assert run(str(path)).cache_key == young
    (note,) = (tmp_path / "cache" / "data" / "files").iterdir()
    note.write_text("remembered")
    assert run(str(path)).cache_key != young  # what is remembered is used
    path.write_text(path.read_text().replace('"q"', '"r"'))
    os.utime(path, (1_000_001, 1_000_001))
    assert run(str(path)).cache_key not in (young, "remembered")
    assert len(list((tmp_path / "cache" / "data" / "files").iterdir())) == 2


PREPARE = """
import json, os, signal, sys
from pathlib import Path
from shardwise.data import build, prepare
from shardwise.data.identity import rows_digest
from shardwise.recipe import parse_recipe

build.BATCH, build.JOURNAL_SECONDS = 16, 0.0
model, source, cache, stop = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])
batches = 0

def progress(phase, done, total):
    global batches
    batches += 1
    if stop and done >= stop:
        os.kill(os.getpid(), signal.SIGKILL)

data = parse_recipe(json.dumps({"model": "x", "data": {"train": source, "validation": 0}})).data
found = prepare(data, model, cache=Path(cache), progress=progress)
print(json.dumps([rows_digest(found.train), batches, found.report.rows_read]))
"""


def test_a_killed_preparation_goes_on_in_one_of_two_processes_and_the_other_waits(
    toy: Path, tmp_path: Path
) -> None:
    source = write_rows(tmp_path / "a.jsonl", [chat(f"q{i}", "a" * (i % 7 + 1)) for i in range(400)])

    def start(cache: str, stop: int = 0) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", PREPARE, str(toy), str(source), str(tmp_path / cache), str(stop)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    whole, killed = start("whole"), start("shared", stop=208)
    expected = json.loads(whole.communicate(timeout=120)[0])
    assert killed.wait(timeout=120) == -signal.SIGKILL and expected[1] == 25
    both = [start("shared"), start("shared")]
    found = [json.loads(process.communicate(timeout=120)[0]) for process in both]
    assert [digest for digest, _, _ in found] == [expected[0]] * 2
    assert [read for _, _, read in found] == [400, 400]
    assert sorted(batches for _, batches, _ in found)[0] == 0  # one of them found everything done
    assert 12 <= sum(batches for _, batches, _ in found) <= 14  # and the other only what was left
