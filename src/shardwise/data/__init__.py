"""From any file people have to exactly the right tokens and labels.

Answers: which token ids, which labels, how many steps? No tensors, no torch.
Names are imported when used: numpy and the tokenizer libraries cost nothing to a plan without data.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardwise.data.build import find_part
    from shardwise.data.order import Bin, Documents, Feed, Order, make_order, run_order
    from shardwise.data.preparation import Prepared, default_cache, prepare
    from shardwise.data.prompt import end_ids, render_prompt
    from shardwise.data.report import DataReport
    from shardwise.data.store import Rows
    from shardwise.data.tokenizer import load_tokenizer

_HOMES = {
    "Bin": "order",
    "DataReport": "report",
    "Documents": "order",
    "Feed": "order",
    "Order": "order",
    "Prepared": "preparation",
    "Rows": "store",
    "default_cache": "preparation",
    "find_part": "build",
    "end_ids": "prompt",
    "load_tokenizer": "tokenizer",
    "make_order": "order",
    "prepare": "preparation",
    "render_prompt": "prompt",
    "run_order": "order",
}
__all__ = [
    "Bin",
    "DataReport",
    "Documents",
    "Feed",
    "Order",
    "Prepared",
    "Rows",
    "default_cache",
    "end_ids",
    "find_part",
    "load_tokenizer",
    "make_order",
    "prepare",
    "render_prompt",
    "run_order",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
