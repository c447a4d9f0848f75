"""What tests of several ways to start ranks share."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import uninterrupted


@pytest.fixture(scope="session")
def whole_losses(tiny_model: Path, chat_file: Path, tmp_path_factory) -> list[tuple[int, float]]:
    """(step, loss) of the shared recipe, run by two ranks of this machine without interruption."""
    return uninterrupted.losses_of_whole_run(tiny_model, chat_file, tmp_path_factory.mktemp("whole"))
