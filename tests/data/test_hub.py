"""Datasets of a hub: fetched once, or read over the network as a run goes on. The hub is one of our own."""

import gzip
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from data_toys import chat
from fake_hub import Hub, serve

NAME = "org/chats"


def lines(name: str, count: int) -> bytes:
    return "".join(json.dumps(chat(f"{name}{i}", "a" * (i % 9 + 1))) + "\n" for i in range(count)).encode()


FILES = {
    "README.md": b"# Chats",
    "data/train-00000.jsonl": lines("a", 300),
    "data/train-00001.jsonl.gz": gzip.compress(lines("b", 300)),
    "data/test.jsonl": lines("t", 5),
    "image.png": b"no data",
}
# Everything in one fresh interpreter, because the hub's library reads its address when it is imported.
SCRIPT = """
import json, sys
from shardwise.data import prepare
from shardwise.data.stream_reader import StreamReader
from shardwise.errors import ShardwiseError
from shardwise.recipe import parse_recipe

def prepared(path, **keys):
    tree = {"model": "x", "data": {"train": path, "validation": 0} | keys, "training": {"max_steps": 9}}
    return prepare(parse_recipe(json.dumps(tree)).data, sys.argv[1])

def told(call):
    try:
        return call()
    except ShardwiseError as problem:
        return str(problem)

def fetched(path):
    report = prepared(path).report
    return [[f.name, f.rows_read] for f in report.files]

def streamed(path):
    found = prepared(path, streaming=True, sequence_length=64, buffer_rows=40)
    def some(first, last, position=None):
        reader = StreamReader(found.stream, 4, position=position)
        rows = [[list(b.rows.source(i)) for i in one]
                for step in range(first, last) for b, one in reader.sequences(step)]
        position = {"lanes": 1, "places": reader.position(last)}
        reader.close()
        return rows, position
    whole, _ = some(0, 40)
    _, position = some(0, 25)
    return [whole[100:] == some(25, 40, position)[0], whole[:3], found.report.streamed]

ways = {"fetched": fetched, "streamed": streamed}
print(json.dumps([told(lambda: ways[how](path)) for how, path in json.loads(sys.argv[2])]))
"""


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    with serve(NAME, FILES) as found:
        yield found


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hub")


def ask(hub: Hub, home: Path, toy: Path, *asked: tuple[str, str], **environment: str) -> list[Any]:
    known = {
        "HF_ENDPOINT": hub.endpoint,
        "HF_HUB_OFFLINE": "0",
        "HF_HOME": str(home / "hf"),
        "HF_HUB_DISABLE_XET": "1",
        "SHARDWISE_CACHE": str(home / "cache"),
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(toy), json.dumps(asked)],
        env={**os.environ, **known, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    found: list[Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_a_dataset_of_the_hub_is_fetched_by_split_and_read_as_it_goes(
    hub: Hub, home: Path, toy: Path
) -> None:
    hub.log.clear()
    hub.failures = 2  # it stumbles, and is asked again
    stream, train, test, inside, nosplit, nothing = ask(
        hub,
        home,
        toy,
        ("streamed", NAME),
        ("fetched", NAME),
        ("fetched", f"{NAME}:test"),
        ("fetched", f"hf://datasets/{NAME}/data/*.gz"),
        ("fetched", f"{NAME}:nosplit"),
        ("fetched", "org/nothing"),
    )
    assert train == [[f"{NAME}/data/train-00000.jsonl", 300], [f"{NAME}/data/train-00001.jsonl.gz", 300]]
    assert test == [[f"{NAME}/data/test.jsonl", 5]]
    assert inside == [[f"{NAME}/data/train-00001.jsonl.gz", 300]]
    assert "has no split 'nosplit'" in nosplit and "data/train-00000.jsonl" in nosplit
    assert "knows no dataset of that name" in nothing
    same, first, said = stream
    assert hub.failures == 0
    assert same and first[0][0][0].startswith(f"{NAME}/data/train") and "2 files" in said
    reads = [line for line in hub.log if line.startswith("GET /datasets")]
    assert not any("README" in line or "png" in line for line in reads)
    assert any("bytes=" in line for line in reads)  # the stream asks for parts of files


def test_what_was_fetched_is_there_without_a_connection(hub: Hub, home: Path, toy: Path) -> None:
    ask(hub, home, toy, ("fetched", NAME))
    before = len(hub.log)
    train, other = ask(hub, home, toy, ("fetched", NAME), ("fetched", "org/other"), HF_HUB_OFFLINE="1")
    assert [rows for _, rows in train] == [300, 300] and len(hub.log) == before
    assert "HF_HUB_OFFLINE is set" in other and "hf download --repo-type dataset org/other" in other
    refused = ask(hub, home, toy, ("fetched", "org/other"), HF_ENDPOINT="http://127.0.0.1:9")[0]
    assert "did not answer as hoped" in refused and "check the connection" in refused
