"""Fixtures of the data tests."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from data_toys import make_tokenizer, write_rows

from shardwise.data import Prepared, prepare
from shardwise.data.tokenizer import Tokenizer, load_tokenizer
from shardwise.recipe import parse_recipe


@pytest.fixture(scope="session")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(tmp_path_factory.mktemp("toy"))


@pytest.fixture(scope="session")
def tokenizer(toy: Path) -> Tokenizer:
    return load_tokenizer(toy)


@pytest.fixture
def run(toy: Path, tmp_path: Path) -> Callable[..., Prepared]:
    """prepare() over files or rows, with flags of the data section as keywords."""

    def call(source: Any, model: Path = toy, template: str | None = None, **keys: Any) -> Prepared:
        options = {
            k: keys.pop(k) for k in ("max_length", "vocabulary", "seed", "progress", "cache") if k in keys
        }
        if isinstance(source, list) and "path" not in source[0]:
            source = str(write_rows(tmp_path / f"rows{len(list(tmp_path.iterdir()))}.jsonl", source))
        tree = {"train": source, "validation": 0} | keys
        data = parse_recipe(json.dumps({"model": "x", "data": tree})).data
        options.setdefault("cache", tmp_path / "cache")
        return prepare(data, model, chat_template=template, **options)

    return call
