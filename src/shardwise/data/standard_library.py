"""Real text that every machine with Python has: functions of the standard library and what they say they do.

Each pair asks for the docstring of a function whose source is shown without it; the answer is the docstring's first
paragraph. Written as JSONL with `messages`, it goes through the same door as a user's file.
"""

import ast
import json
import random
import sysconfig
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

QUESTION = "What does this Python function do? Answer with its docstring.\n\n```python\n{source}\n```"
SOURCE_CHARACTERS = 40, 700  # short enough for a demonstration on a CPU
ANSWER_CHARACTERS = 20, 240
SKIPPED_FOLDERS = {"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "__pycache__"}


@dataclass(frozen=True)
class Pair:
    """`source` without its docstring, and the docstring's first paragraph on one line."""

    module: str
    source: str
    answer: str

    def row(self) -> dict[str, object]:
        return {
            "messages": [
                {"role": "user", "content": QUESTION.format(source=self.source)},
                {"role": "assistant", "content": self.answer},
            ]
        }


def write_pairs(folder: Path, train_rows: int, validation_rows: int, seed: int = 0) -> tuple[Path, Path]:
    """Write train.jsonl and validation.jsonl, drawn by `seed`; no module gives rows to both.

    Returns their paths.
    """
    by_module: dict[str, list[Pair]] = {}
    seen: set[str] = set()
    for pair in standard_library_pairs():
        if pair.answer not in seen:  # the same docstring over many overloads teaches nothing new
            seen.add(pair.answer)
            by_module.setdefault(pair.module, []).append(pair)
    draw = random.Random(seed)
    modules = sorted(by_module)
    draw.shuffle(modules)
    validation: list[Pair] = []
    while modules and len(validation) < validation_rows:
        validation += by_module[modules.pop()]
    train = [pair for module in modules for pair in by_module[module]]
    draw.shuffle(train)
    draw.shuffle(validation)
    folder.mkdir(parents=True, exist_ok=True)
    paths = folder / "train.jsonl", folder / "validation.jsonl"
    for path, pairs in zip(paths, (train[:train_rows], validation[:validation_rows]), strict=True):
        text = "".join(json.dumps(pair.row(), ensure_ascii=False) + "\n" for pair in pairs)
        path.write_text(text, encoding="utf-8")
    return paths


def standard_library_pairs() -> Iterator[Pair]:
    """Every function and method of the standard library with a docstring of fitting length, in a fixed order."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        inside = path.relative_to(root)
        if SKIPPED_FOLDERS & set(inside.parts):
            continue
        try:
            text = path.read_text(encoding="utf-8")
            tree = ast.parse(text)
        except (SyntaxError, UnicodeDecodeError, ValueError):
            continue
        lines = text.splitlines()
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                pair = _pair(str(inside), node, lines)
                if pair:
                    yield pair


def _pair(module: str, node: ast.FunctionDef | ast.AsyncFunctionDef, lines: list[str]) -> Pair | None:
    documentation = ast.get_docstring(node)
    if not documentation or len(node.body) < 2:
        return None
    answer = " ".join(documentation.split("\n\n")[0].split())
    docstring = node.body[0]
    assert docstring.end_lineno is not None and node.end_lineno is not None
    if docstring.lineno == node.lineno:  # def and docstring on one line
        return None
    kept = lines[node.lineno - 1 : docstring.lineno - 1] + lines[docstring.end_lineno : node.end_lineno]
    source = textwrap.dedent("\n".join(kept)).strip()
    fits = SOURCE_CHARACTERS[0] <= len(source) <= SOURCE_CHARACTERS[1]
    return (
        Pair(module, source, answer)
        if fits and ANSWER_CHARACTERS[0] <= len(answer) <= ANSWER_CHARACTERS[1]
        else None
    )
