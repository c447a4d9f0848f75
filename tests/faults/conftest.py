"""Real runs of two ranks, started by the command a person types, with faults in them."""

from pathlib import Path

import pytest
from faulty import Ended, Train, trainer


@pytest.fixture(scope="session")
def train(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, chat_file: Path) -> Train:
    return trainer(tmp_path_factory.mktemp("faults"), tiny_model, chat_file)


@pytest.fixture(scope="session", params=["fsdp2", "zero3"])
def engine(request: pytest.FixtureRequest) -> str:
    """The engines that every fault is shown on."""
    name: str = request.param
    if name == "zero3":
        pytest.importorskip("deepspeed")
    return name


_UNDISTURBED: dict[str, Ended] = {}


@pytest.fixture(scope="session")
def undisturbed(train: Train, engine: str) -> Ended:
    """What a run with a fault in it must end as, by engine; run once however often pytest sets this up."""
    if engine not in _UNDISTURBED:
        ended = train(f"undisturbed-{engine}", engine=engine)
        assert ended.code == 0, ended.text[-2000:]
        _UNDISTURBED[engine] = ended
    return _UNDISTURBED[engine]
