"""What was saved goes on as if nothing had happened: bitwise on the same layout, to 1e-5 on any other."""

import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import layouts
import pytest
from layouts import LAYOUTS, WORLDS, name_of

from shardwise.launch import start
from shardwise.runs import RunFolder

Layout = tuple[str, int]
HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import toy

    root = tmp_path_factory.mktemp("resume")
    toy.make_model(root / "model")
    return root


@pytest.fixture(scope="module")
def found(folder: Path) -> dict[str, Any]:
    """Losses and final weights of every layout alone, and of every crossing. SHARDWISE_TEST_LAYOUTS=all: all 240."""
    pytest.importorskip("deepspeed")

    def job(world: int) -> dict[str, Any]:
        command = [sys.executable, str(HERE / "layouts.py"), str(folder)]
        logs = folder / f"logs-{world}"
        outcome = start(command, world, logs, {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"})
        assert outcome.exit_code == 0, (logs / "rank-0.log").read_text()[-3000:]
        made: dict[str, Any] = json.loads((folder / f"out-{world}.json").read_text())
        return made

    with ThreadPoolExecutor() as pool:
        made = {key: value for part in pool.map(job, WORLDS) for key, value in part.items()}
    record = os.environ.get("SHARDWISE_TEST_RECORD")
    if record:
        Path(record).write_text(json.dumps(_table(made), indent=1))
    return made


def _table(made: dict[str, Any]) -> dict[str, Any]:
    """Largest relative difference of a loss, for every crossing that was made, and whether it is bitwise."""
    pairs = [key for key in made if " -> " in key]
    return {
        key: {
            "relative_loss_difference": apart(made[key]["losses"], made[key.split(" -> ")[0]]["losses"]),
            "bitwise": made[key] == made[key.split(" -> ")[0]],
        }
        for key in sorted(pairs)
    }


def apart(a: list[float], b: list[float]) -> float:
    assert len(a) == len(b) == layouts.STEPS - layouts.SAVED
    return max(abs(x - y) / abs(y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("layout", LAYOUTS, ids=name_of)
def test_c07_each_engine_resumes_bitwise_on_the_same_ranks(layout: Layout, found: dict[str, Any]) -> None:
    """Losses of 10 steps and final weights; a step whose gradients were discarded leaves no trace."""
    assert found[f"{name_of(layout)} -> {name_of(layout)}"] == found[name_of(layout)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=name_of)
def test_c07_what_any_layout_saved_goes_on_on_others(layout: Layout, found: dict[str, Any]) -> None:
    """1 <-> 2 <-> 4 ranks and engine to engine: to 1e-6 in the loss within one engine, 1e-5 between two."""
    made = {key: value for key, value in found.items() if key.startswith(f"{name_of(layout)} -> ")}
    assert len(made) > 2
    for key, value in made.items():
        same_engine = key.split(" -> ")[1].split(" on ")[0] == layout[0]
        difference = apart(value["losses"], found[name_of(layout)]["losses"])
        assert difference <= (1e-6 if same_engine else 1e-5), key


def test_every_layout_trains_alike_from_the_start(found: dict[str, Any]) -> None:
    for layout in LAYOUTS:
        assert apart(found[name_of(layout)]["losses"], found["single on 1"]["losses"]) <= 1e-5


@pytest.fixture
def single(folder: Path) -> dict[str, Any]:
    """The reference, in this process; its checkpoint is in the folder."""
    from shardwise.training.engines.protocol import Ranks

    return layouts.undisturbed(("single", 1), folder, Ranks())


def test_s01_pickles_beside_a_checkpoint_are_never_opened(folder: Path, single: dict[str, Any]) -> None:
    """A folder made by somebody else, its manifest in order, with code in every file a trainer may unpickle."""
    import pickle
    import shutil

    from shardwise.runs.checkpoints import chosen, publish
    from shardwise.training.engines.protocol import Ranks

    marker = folder / "ran"

    class Payload:
        def __reduce__(self) -> Any:
            return (open, (str(marker), "w"))

    run = RunFolder(folder / "foreign")
    work = run.checkpoint_path(layouts.SAVED).with_suffix(".writing")
    shutil.copytree(RunFolder(folder / "single on 1").checkpoint_path(layouts.SAVED), work)
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
    publish(work, run.checkpoint_path(layouts.SAVED), {})
    assert chosen(run)[0].step == layouts.SAVED
    engine = layouts.build("single", folder, Ranks())
    assert layouts.go_on(engine, run, layouts.SAVED) == single
    # the program's own file replaced by a pickle is refused, by name
    index = json.loads((run.checkpoint_path(layouts.SAVED) / "index.json").read_text())
    file = next(iter(index["tensors"].values()))["pieces"][0]["file"]
    (run.checkpoint_path(layouts.SAVED) / file).write_bytes(pickle.dumps(Payload()))
    from shardwise.errors import CheckpointError

    with pytest.raises(CheckpointError, match=r"rank-0\.safetensors"):
        layouts.go_on(layouts.build("single", folder, Ranks()), run, layouts.SAVED)
    assert not marker.exists()
