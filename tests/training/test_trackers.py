"""A real run tells its trackers what its events say: read back from their own files, number by number."""

import importlib.util
import json
import sqlite3
import struct
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shardwise.runs import RunFolder
from shardwise.runs.tracking import numbers_of

Told = dict[str, dict[int, float]]  # name -> step -> value

RECIPE = """model: {model}
data: {{train: {data}, validation: 4, sequence_length: 64}}
method: lora
lora: {{rank: 4}}
training: {{max_steps: 5, global_batch_size: 2, micro_batch_size: 1}}
evaluation: {{every_steps: 2, samples: 0}}
run: {{name: tracked, tracking: {trackers}}}
"""


def from_tensorboard(folder: Path) -> Told:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.util.tensor_util import make_ndarray

    read = EventAccumulator(str(folder / "runs" / "tracked" / "tensorboard"), size_guidance={"tensors": 0})
    read.Reload()
    found: Told = defaultdict(dict)
    for name in read.Tags()["tensors"]:
        for event in read.Tensors(name):
            found[name][event.step] = float(make_ndarray(event.tensor_proto))
    for name in read.Tags()["scalars"]:
        for scalar in read.Scalars(name):
            found[name][scalar.step] = scalar.value
    return found


def level_db_log(raw: bytes, start: int) -> Iterator[bytes]:
    """Records of LevelDB's log format: blocks of 32 KiB; checksum 4, length 2, kind 1 (1 whole, 4 the last part)."""
    at, part = start, b""
    while at + 7 <= len(raw):
        left = 2**15 - at % 2**15
        if left < 7:
            at += left
            continue
        length, kind = struct.unpack("<HB", raw[at + 4 : at + 7])
        part += raw[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield part
            part = b""


def from_wandb(folder: Path) -> Told:
    from wandb.proto import wandb_internal_pb2

    found: Told = defaultdict(dict)
    (file,) = (folder / "runs" / "tracked" / "wandb").glob("offline-run-*/run-*.wandb")
    for data in level_db_log(file.read_bytes(), start=7):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        items = {i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in record.history.item}
        for name, value in items.items():
            if not name.startswith("_"):
                found[name][int(items["_step"])] = value
    return found


def from_mlflow(folder: Path) -> Told:
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{folder / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("shardwise")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    return {
        name: {m.step: m.value for m in client.get_metric_history(run.info.run_id, name)}
        for name in run.data.metrics
    }


def from_trackio(folder: Path) -> Told:
    found: Told = defaultdict(dict)
    (file,) = (folder / "trackio").glob("shardwise*.db")
    with sqlite3.connect(file) as database:
        for step, text in database.execute("select step, metrics from metrics"):
            for name, value in json.loads(text).items():
                found[name][step] = value
    return found


READERS: dict[str, Callable[[Path], Told]] = {
    "tensorboard": from_tensorboard,
    "wandb": from_wandb,
    "mlflow": from_mlflow,
    "trackio": from_trackio,
}


def test_trackers_hold_exactly_what_the_events_say(
    tiny_model: Path, chat_file: Path, tmp_path: Path, shardwise: Callable
) -> None:
    """One run for every tracker whose package is installed."""
    installed = [name for name in READERS if importlib.util.find_spec(name) is not None]
    if not installed:
        pytest.skip(f"none of {', '.join(READERS)} is installed")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE.format(model=tiny_model, data=chat_file, trackers=json.dumps(installed)))
    where = {
        "WANDB_MODE": "offline",
        "MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path / 'mlflow.db'}",
        "TRACKIO_DIR": str(tmp_path / "trackio"),
    }
    done = shardwise("train", recipe, cwd=tmp_path, **where)
    assert done.returncode == 0, done.stderr
    run = RunFolder(tmp_path / "runs" / "tracked")
    assert not list(run.events("warning"))
    said: Told = defaultdict(dict)
    for event in run.events():
        found = numbers_of(event)
        for name, value in found[1].items() if found else ():
            said[name][found[0]] = value
    assert set(said["train/loss"]) == {1, 2, 3, 4, 5} and said["evaluation/loss"]
    for name in installed:
        told = READERS[name](tmp_path)
        assert set(told) == set(said), name
        for key, course in said.items():
            assert set(told[key]) == set(course), (name, key)
            for step, value in course.items():
                assert told[key][step] == pytest.approx(value, rel=1e-6), (name, key, step)
