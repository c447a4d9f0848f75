"""The README shows real output of real commands: each console block that plans is run again and compared."""

import re
import shlex
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"^```console\n(.*?)^```", re.M | re.S)


def blocks() -> list[tuple[str, str]]:
    """(command, expected output) of every console block in README and docs."""
    found = []
    for path in [ROOT / "README.md"]:
        for block in BLOCK.findall(path.read_text()):
            for part in re.split(r"^\$ ", block, flags=re.M)[1:]:
                command, _, output = part.partition("\n")
                found.append((command, output))
    return found


EXACT = [b for b in blocks() if b[0].startswith("shardwise plan")]
OTHER = [b for b in blocks() if not b[0].startswith("shardwise plan")]


def test_there_is_something_to_check() -> None:
    assert EXACT and OTHER


@pytest.mark.parametrize(("command", "output"), EXACT, ids=[c for c, _ in EXACT])
def test_plans_print_what_the_readme_says(command: str, output: str, tmp_path: Path, shardwise) -> None:
    done = shardwise(*shlex.split(command)[1:], cwd=tmp_path, HF_HUB_OFFLINE="1")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.rstrip().splitlines()
    wanted = output.rstrip().splitlines()
    if "..." in wanted:  # the README leaves out a middle part
        cut = wanted.index("...")
        head, tail = wanted[:cut], wanted[cut + 1 :]
        lines = lines[: len(head)] + ["..."] + (lines[-len(tail) :] if tail else [])
    assert [x.rstrip() for x in lines] == [x.rstrip() for x in wanted]


@pytest.mark.parametrize(("command", "output"), OTHER, ids=[c for c, _ in OTHER])
def test_commands_in_the_readme_exist(command: str, output: str, shardwise) -> None:
    words = shlex.split(command)
    if words[0] == "make":
        assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.M)
        return
    assert words[0] == "shardwise"
    group = words[1] == "data"
    done = shardwise(*words[1 : 3 if group else 2], "--help")
    assert done.returncode == 0
    for option in (w.partition("=")[0] for w in words[2:] if w.startswith("--")):
        assert option in done.stdout
