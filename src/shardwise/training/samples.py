"""Answers to held-out prompts, greedy, so that before and after can be laid side by side."""

from collections.abc import Sequence
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
                tokenizer.full.decode(ids[:start].tolist(), skip_special_tokens=True),
                tokenizer.full.decode(answer, skip_special_tokens=True).strip(),
            )
        )
    return prompts


def answer(engine: Engine, tokenizer: Any, prompts: Sequence[Prompt], max_new_tokens: int) -> list[str]:
    """One greedy answer per prompt (collective: weights are gathered on every rank). Rank 0's are used."""
    answers = []
    model = engine.module.causal_lm if engine.module.model is engine.module.causal_lm else engine.module.model
    with engine.gathered(), torch.no_grad():
        engine.module.eval()
        for prompt in prompts:
            ids = torch.from_numpy(prompt.ids.astype(np.int64))[None].to(engine.device)
            out = model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=max_new_tokens,
                do_sample=False,
                use_cache=True,
                pad_token_id=tokenizer.full.pad_token_id
                if tokenizer.full.pad_token_id is not None
                else tokenizer.full.eos_token_id,
            )
            answers.append(tokenizer.full.decode(out[0, ids.shape[1] :], skip_special_tokens=True).strip())
        engine.module.train()
    return answers
