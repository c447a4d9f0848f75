"""The rows that benchmarks train on: `python benchmarks/rows.py FOLDER` writes mixed.jsonl and long.jsonl.

Chats about functions of Python's standard library: a question with a function's first line, answered with its
source. mixed.jsonl: 64 chats of 60 to 512 tokens, lengths drawn evenly. long.jsonl: 16 chats whose answers are
several functions, each at least `--long` tokens, so that every trainer cuts them to one full sequence.
Tokens are taken as 3.7 characters of source, SmolLM2's rate on it: a trainer's own count decides.
"""

import argparse
import ast
import json
import random
import sysconfig
from pathlib import Path

CHARACTERS_PER_TOKEN = 3.7
MODULES = """argparse ast calendar configparser datetime difflib email/message fractions heapq http/client inspect
ipaddress pathlib pickle random shutil statistics string subprocess tarfile textwrap threading traceback typing uuid
zipfile""".split()


def functions() -> list[str]:
    """Sources of functions, in a fixed order."""
    root, found = Path(sysconfig.get_path("stdlib")), []
    for module in MODULES:
        path = root / f"{module}.py"
        if not path.is_file():
            continue
        text = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                found.append(ast.get_source_segment(text, node) or "")
    return [f for f in dict.fromkeys(found) if f]


def chat(source: str) -> dict[str, object]:
    question = f"Write the Python function that begins with: {source.splitlines()[0].strip()}"
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": source}]}


def mixed(sources: list[str], count: int, longest: int, draw: random.Random) -> list[dict[str, object]]:
    """Chats whose lengths are spread evenly up to `longest` tokens."""
    overhead = 70  # the template's own words and the question
    rows = []
    for _ in range(count):
        wanted = draw.uniform(overhead + 20, longest)
        characters = (wanted - overhead) * CHARACTERS_PER_TOKEN
        best = min(sources, key=lambda s: abs(len(s) - characters))
        sources.remove(best)
        rows.append(chat(best))
    return rows


def long(sources: list[str], count: int, tokens: int, draw: random.Random) -> list[dict[str, object]]:
    rows = []
    for _ in range(count):
        parts: list[str] = []
        while sum(map(len, parts)) < tokens * 4.4:
            parts.append(draw.choice(sources))
        rows.append(chat("\n\n".join(parts)))
    return rows


def write(folder: Path, long_tokens: int = 2048, seed: int = 0) -> tuple[Path, Path]:
    """Both files; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    draw, sources = random.Random(seed), functions()
    paths = folder / "mixed.jsonl", folder / "long.jsonl"
    made = mixed(list(sources), 64, 512, draw), long(sources, 16, long_tokens, draw)
    for path, rows in zip(paths, made, strict=True):
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return paths


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--long", type=int, default=2048, help="tokens of a long row, at least")
    args = parser.parse_args()
    for path in write(args.folder, args.long):
        print(path)
