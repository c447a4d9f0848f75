"""Tiny models, uneven micro-batches and the step of the loop in ten lines: what engines are held against."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, LlamaConfig

from shardwise.recipe.schema import Recipe
from shardwise.training.batches import MicroBatch, pack_documents
from shardwise.training.engines.protocol import Engine

VOCABULARY = 97
# Trained tokens differ by a factor of 15 between ranks and micro-batches (case L03), and one bin is empty.
LENGTHS = ((3, 40), (5, 60), (4,), (30, 2, 50))


def recipe(**sections: Any) -> Recipe:
    """A resolved recipe; `sections` are dictionaries merged over a small default."""
    tree: dict[str, Any] = {
        "model": {"source": "toy", "attention": "sdpa"},
        "data": {"train": ({"path": "none.jsonl"},)},
        "method": "full",
        "optimizer": {"learning_rate": 1e-3, "weight_decay": 0.01, "max_grad_norm": 0.5},
        "training": {
            "max_steps": 20,
            "micro_batch_size": 1,
            "global_batch_size": 4,
            "precision": "fp32",
            "activation_checkpointing": "none",
            "loss": "chunked",
        },
        "engine": {"device": "cpu", "processes": 2},
    }
    for key, value in sections.items():
        tree[key] = {**tree.get(key, {}), **value} if isinstance(value, dict) else value
    return Recipe.model_validate(tree)


def make_model(folder: Path, tied: bool = False, layers: int = 2, hidden: int = 64) -> Path:
    """A tiny Llama on disk, as safetensors."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=2 * hidden + 4,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=tied,
        initializer_range=0.1,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@dataclass
class Trace:
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)


def micro_batches(step: int, ranks: int, rank: int, vocabulary: int = VOCABULARY) -> list[MicroBatch]:
    """This rank's micro-batches of one step: the same four bins, dealt over the ranks."""
    random = np.random.default_rng(step)
    bins = []
    for lengths in LENGTHS:
        documents = []
        for n in lengths:
            ids = random.integers(0, vocabulary, n).astype(np.int32)
            documents.append((ids, np.where(np.arange(n) < n // 3, -100, ids)))
        bins.append(pack_documents(documents))
    return bins[rank::ranks]


def train_step(
    engine: Engine, batches: Sequence[MicroBatch], rate: float, max_norm: float | None
) -> tuple[float, float]:
    """(loss per trained token over all ranks, gradient norm)."""
    tokens = total(sum(b.trained_tokens for b in batches), engine)
    summed = 0.0
    for i, batch in enumerate(batches):
        loss = engine.forward(batch)
        engine.backward(loss, 1 / tokens, last=i == len(batches) - 1)
        summed += float(loss.detach())
    return total(summed, engine) / tokens, engine.step(rate, max_norm)


def total(value: float, engine: Engine) -> float:
    if engine.ranks.world_size == 1:
        return value
    tensor = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(tensor)
    return float(tensor)


def train(engine: Engine, steps: range, rate: float, max_norm: float | None) -> Trace:
    trace = Trace()
    for step in steps:
        batches = micro_batches(step, engine.ranks.world_size, engine.ranks.rank)
        loss, norm = train_step(engine, batches, rate, max_norm)
        trace.losses.append(loss)
        trace.norms.append(norm)
    return trace


def evaluate(engine: Engine) -> float:
    batches = micro_batches(10**6, engine.ranks.world_size, engine.ranks.rank)
    with torch.no_grad():
        summed = sum(float(engine.forward(b)) for b in batches)
    return total(summed, engine) / total(sum(b.trained_tokens for b in batches), engine)


def weights(engine: Engine) -> dict[str, torch.Tensor]:
    return {name: tensor.float().clone() for name, tensor in engine.trained_weights()}


def distance(ours: dict[str, torch.Tensor], reference: dict[str, torch.Tensor]) -> float:
    """Largest relative difference (Euclidean) of one tensor."""
    assert ours.keys() == reference.keys(), ours.keys() ^ reference.keys()
    return max(
        float((ours[n] - reference[n]).norm() / reference[n].norm().clamp_min(1e-12)) for n in reference
    )


def generate(engine: Engine) -> list[int]:
    """Greedy continuation by the bare model, as samples are made."""
    out = engine.module.model.generate(  # type: ignore[operator]
        input_ids=torch.arange(5, 11)[None], max_new_tokens=4, do_sample=False, pad_token_id=0
    )
    return [int(token) for token in out[0]]


def held_bytes(engine: Engine) -> dict[str, int]:
    """Bytes of long-lived tensors on this rank, by memory term; a storage counts once."""
    seen: set[int] = set()
    held = {}
    for term, tensors in engine.tensors().items():
        held[term] = 0
        for tensor in tensors:
            local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
            storage = local.untyped_storage()
            if storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                held[term] += storage.nbytes()
    return held
