"""What was saved goes on as if nothing had happened: bitwise on the same layout, to 1e-5 on any other."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from shardwise.launch import start
from shardwise.runs import RunFolder

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "engines")]
HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import toy

    root = tmp_path_factory.mktemp("resume")
    toy.make_model(root / "model")
    return root


@pytest.fixture(scope="module")
def single(folder: Path) -> dict[str, Any]:
    import pair
    import toy

    from shardwise.training.checkpoint.save import save
    from shardwise.training.engines.protocol import Ranks

    run = RunFolder(folder / "single")
    engine = pair.build("single", folder, Ranks())
    toy.train(engine, range(pair.SAVED), pair.RATE, pair.NORM)
    save(run, engine, pair.SAVED, {}, keep=2)
    trace = toy.train(engine, range(pair.SAVED, pair.STEPS), pair.RATE, pair.NORM)
    return {"losses": trace.losses, "weights": pair.bits(engine)}


@pytest.fixture(scope="module")
def two_ranks(folder: Path, single: dict[str, Any]) -> dict[str, Any]:
    pytest.importorskip("deepspeed")
    out = folder / "out.json"
    command = [sys.executable, str(HERE / "pair.py"), str(folder), str(out)]
    outcome = start(command, 2, folder / "logs", {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"})
    assert outcome.exit_code == 0, (folder / "logs" / "rank-0.log").read_text()[-3000:]
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def apart(a: list[float], b: list[float]) -> float:
    return max(abs(x - y) / abs(y) for x, y in zip(a, b, strict=True))


def test_single_resumes_bitwise(folder: Path, single: dict[str, Any]) -> None:
    import pair

    from shardwise.training.engines.protocol import Ranks

    engine = pair.build("single", folder, Ranks())
    assert pair.go_on(engine, RunFolder(folder / "single"), pair.SAVED) == single


@pytest.mark.parametrize("engine", ["ddp", "fsdp2", "zero2", "zero3"])
def test_c07_each_engine_resumes_bitwise_on_the_same_ranks(engine: str, two_ranks: dict[str, Any]) -> None:
    assert two_ranks[f"{engine} resumed"] == two_ranks[engine]


@pytest.mark.parametrize(
    "crossing", ["fsdp2 to zero3", "zero3 to fsdp2", "ddp to zero2", "zero2 to fsdp2", "single to fsdp2"]
)
def test_one_engine_goes_on_from_another(
    crossing: str, two_ranks: dict[str, Any], single: dict[str, Any]
) -> None:
    assert apart(two_ranks[crossing]["losses"], single["losses"]) < 1e-5


@pytest.mark.parametrize("engine", ["ddp", "fsdp2", "zero2", "zero3"])
def test_c07_two_ranks_go_on_as_one(
    engine: str, folder: Path, two_ranks: dict[str, Any], single: dict[str, Any]
) -> None:
    import pair

    from shardwise.training.engines.protocol import Ranks

    one = pair.build("single", folder, Ranks())
    found = pair.go_on(one, RunFolder(folder / engine), pair.SAVED)
    assert apart(found["losses"], single["losses"]) < 1e-5
    assert apart(found["losses"], two_ranks[engine]["losses"]) < 1e-5


def test_s01_pickles_beside_a_checkpoint_are_never_opened(folder: Path, single: dict[str, Any]) -> None:
    """A folder made by somebody else, its manifest in order, with code in every file a trainer may unpickle."""
    import pickle
    import shutil

    import pair

    from shardwise.runs.checkpoints import chosen, publish
    from shardwise.training.engines.protocol import Ranks

    marker = folder / "ran"

    class Payload:
        def __reduce__(self) -> Any:
            return (open, (str(marker), "w"))

    run = RunFolder(folder / "foreign")
    work = run.checkpoint_path(pair.SAVED).with_suffix(".writing")
    shutil.copytree(RunFolder(folder / "single").checkpoint_path(pair.SAVED), work)
    for name in (
        ".metadata",
        "rng_state.pth",
        "optimizer.pt",
        "scheduler.pt",
        "training_args.bin",
        "random-0.pt",
    ):
        (work / name).write_bytes(pickle.dumps(Payload()))
    for name in ("manifest.json", "complete"):
        (work / name).unlink()
    publish(work, run.checkpoint_path(pair.SAVED), {})
    assert chosen(run)[0].step == pair.SAVED
    engine = pair.build("single", folder, Ranks())
    assert pair.go_on(engine, run, pair.SAVED) == single
    # the program's own file replaced by a pickle is refused, by name
    index = json.loads((run.checkpoint_path(pair.SAVED) / "index.json").read_text())
    file = next(iter(index["tensors"].values()))["pieces"][0]["file"]
    (run.checkpoint_path(pair.SAVED) / file).write_bytes(pickle.dumps(Payload()))
    from shardwise.errors import CheckpointError

    with pytest.raises(CheckpointError, match=r"rank-0\.safetensors"):
        pair.go_on(pair.build("single", folder, Ranks()), run, pair.SAVED)
    assert not marker.exists()
