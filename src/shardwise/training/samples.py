"""Answers to held-out prompts, greedy, so that before and after can be laid side by side."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from shardwise.data import Rows
from shardwise.training.engines.protocol import Engine


@dataclass(frozen=True)
class Prompt:
    """Token ids up to the first trained token, and the text that follows in the data."""

    ids: np.ndarray  # (T,)
    text: str
    reference: str


def pick(rows: Rows | None, tokenizer: Any, count: int) -> list[Prompt]:
    """The first `count` rows with a prompt, spread over the held-out set."""
    if rows is None or count == 0:
        return []
    prompts = []
    for i in np.linspace(0, len(rows) - 1, num=min(count, len(rows)), dtype=int):
        ids, labels = rows.row(int(i))
        trained = np.flatnonzero(labels != -100)
        if len(trained) == 0 or trained[0] == 0:
            continue
        start = int(trained[0])
        answer = [int(t) for t in ids[start:][labels[start:] != -100]]
        prompts.append(
            Prompt(
                ids[:start],
                _question(tokenizer.full.decode(ids[:start].tolist(), skip_special_tokens=True)),
                tokenizer.full.decode(answer, skip_special_tokens=True).strip(),
            )
        )
    return prompts


def _question(text: str) -> str:
    """A prompt as people want to see it: the last user turn, where the template writes roles as lines."""
    return text.rsplit("\nuser\n", 1)[-1].strip().removesuffix("assistant").strip()


def answer(
    engine: Engine, tokenizer: Any, prompts: Sequence[Prompt], max_new_tokens: int, ends: Iterable[int]
) -> list[str]:
    """One greedy answer per prompt (collective: weights are gathered on every rank). Rank 0's are used."""
    with engine.gathered():
        engine.module.eval()
        said = [
            generate(engine.module.model, tokenizer, p.ids, max_new_tokens, ends, engine.device)
            for p in prompts
        ]
        engine.module.train()
    return said


def generate(
    model: Any, tokenizer: Any, ids: np.ndarray, max_new_tokens: int, ends: Iterable[int], device: Any
) -> str:
    """The most likely continuation of `ids` (T,), up to a token in `ends`."""
    inputs = torch.from_numpy(np.asarray(ids).astype(np.int64))[None].to(device)
    ends = sorted(ends)
    with torch.no_grad():
        out = model.generate(
            input_ids=inputs,
            attention_mask=torch.ones_like(inputs),
            max_new_tokens=max_new_tokens,
            do_sample=False,
            use_cache=True,
            eos_token_id=ends or None,
            pad_token_id=ends[0] if ends else 0,
        )
    text: str = tokenizer.full.decode(out[0, inputs.shape[1] :], skip_special_tokens=True)
    return text.strip()
