"""A rank whose share of a step has no label still takes part: every trained weight gets a gradient of 0."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from shardwise.training.batches import pack_documents
from shardwise.training.model import ModelFolder, prepare_for_training

sys.path.insert(0, str(Path(__file__).parent))
import toy


@pytest.mark.parametrize("loss", ["chunked", "full"])
def test_a_batch_without_labels_reaches_every_weight(loss: str, tmp_path: Path) -> None:
    recipe = toy.recipe(training={"loss": loss, "precision": "fp32"})
    model = prepare_for_training(ModelFolder(toy.make_model(tmp_path), recipe).load(), recipe)
    batch = pack_documents([(np.arange(5, dtype=np.int32), np.full(5, -100, np.int32))])
    value = model(batch)
    value.backward()
    assert float(value.detach()) == 0.0
    for name, param in model.named_parameters():
        assert param.grad is not None and not torch.any(param.grad), name
