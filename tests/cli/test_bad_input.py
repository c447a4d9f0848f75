"""Bad input: three lines that name the place, exit code 2, no stack trace, nothing left behind."""

import json
from pathlib import Path

import pytest

GOOD = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]}


@pytest.fixture
def folder(tmp_path: Path, tiny_model: Path) -> Path:
    (tmp_path / "good.jsonl").write_text((json.dumps(GOOD) + "\n") * 4)
    (tmp_path / "empty.jsonl").write_text("")
    rows = [json.dumps(GOOD)] * 4
    rows[2] = rows[2][:-1]
    (tmp_path / "broken.jsonl").write_text("\n".join(rows) + "\n")
    (tmp_path / "no-config").mkdir()
    return tmp_path


CASES = {
    "unknown key": (
        "model: {model}\ndata: good.jsonl\nlora:\n  rnak: 8\n",
        ["recipe.yaml, line 4", "lora.rank"],
    ),
    "word for a number": (
        "model: {model}\ndata: good.jsonl\noptimizer:\n  learning_rate: fast\n",
        ["recipe.yaml, line 4", "'fast'"],
    ),
    "foreign key": ("model: {model}\ndata: good.jsonl\nlr: fast\n", ["recipe.yaml, line 3", "learning_rate"]),
    "missing file": ("model: {model}\ndata: god.jsonl\n", ["god.jsonl", "good.jsonl"]),
    "empty file": ("model: {model}\ndata: empty.jsonl\n", ["empty.jsonl", "no rows"]),
    "broken JSON": ("model: {model}\ndata: broken.jsonl\n", ["broken.jsonl", "line 3"]),
    "no config": ("model: no-config\ndata: good.jsonl\n", ["no-config", "config.json"]),
    "no model": ("model: ./nowhere\ndata: good.jsonl\n", ["nowhere"]),
    "no length twice": (
        "model: {model}\ndata: good.jsonl\ntraining: {{epochs: 1, max_steps: 2}}\n",
        ["line 3", "max_steps"],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_refused_with_place_and_exit_code_2(name: str, folder: Path, tiny_model: Path, shardwise) -> None:
    text, says = CASES[name]
    (folder / "recipe.yaml").write_text(text.format(model=tiny_model))
    before = sorted(p.name for p in folder.iterdir())
    done = shardwise("train", "recipe.yaml", cwd=folder)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    lines = done.stderr.strip().splitlines()
    assert lines[0].startswith("error: ")
    assert any(line.startswith("  why: ") for line in lines)
    assert lines[-1].startswith(" hint: ")
    for part in says:
        assert part in done.stderr
    assert sorted(p.name for p in folder.iterdir()) == before, "something was left behind"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["trian"], "did you mean 'train'"),
        (["train"], "RECIPE.yaml"),
        (["train", "nothing.yaml"], "nothing.yaml"),
        (["train", "--resume", "nothing"], "nothing"),
        (["plan"], "MODEL"),
        (["show", "nothing"], "nothing"),
        (["chat", "nothing"], "nothing"),
    ],
)
def test_misuse_of_the_command(arguments: list[str], says: str, tmp_path: Path, shardwise) -> None:
    done = shardwise(*arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert says in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []
