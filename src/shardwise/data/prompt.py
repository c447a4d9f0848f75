"""Prompts for generation, made by the very path that makes training rows."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from shardwise.data.encode import Encoder
from shardwise.data.templates import chat_template as load_template
from shardwise.data.tokenizer import Tokenizer, load_tokenizer


def render_prompt(
    messages: Sequence[dict[str, Any]],
    model: Tokenizer | Path | str,
    chat_template: str | None = None,
    tools: Sequence[dict[str, Any]] = (),
) -> np.ndarray:
    """Ids (T,) int32 after which the model answers: begin token once, template, header of the answer.

    Raises DataError when the turns are no prompt (the last one must be the user's or a tool's).
    """
    tokenizer = model if isinstance(model, Tokenizer) else load_tokenizer(model)
    return Encoder(tokenizer, load_template(tokenizer, chat_template)).prompt(messages, tools)


def end_ids(model: Tokenizer | Path | str, chat_template: str | None = None) -> frozenset[int]:
    """Ids at which an answer is over: the tokenizer's end token and the template's end of a turn."""
    tokenizer = model if isinstance(model, Tokenizer) else load_tokenizer(model)
    own = tokenizer.template is not None or chat_template is not None
    return Encoder(tokenizer, load_template(tokenizer, chat_template) if own else None).ends
