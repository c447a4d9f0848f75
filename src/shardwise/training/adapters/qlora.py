"""The frozen base in 4 bits, through bitsandbytes."""

from typing import Any

import torch
from transformers import BitsAndBytesConfig, PreTrainedModel

from shardwise.errors import MissingDependencyError
from shardwise.recipe.schema import Quantization
from shardwise.training.model import ModelFolder


def load_quantised(folder: ModelFolder, quantization: Quantization) -> PreTrainedModel:
    """Load with linear layers in NF4 or FP4; embeddings, head and norms stay in compute dtype.

    The usual "preparation" that casts what is left to fp32 is not done: it doubles embeddings and residual stream.
    Raises MissingDependencyError without bitsandbytes.
    """
    try:
        import bitsandbytes  # noqa: F401
    except ImportError:
        raise MissingDependencyError(
            "method: qlora needs bitsandbytes",
            "the package is not installed",
            "pip install 'shardwise[qlora]'",
        ) from None
    options: dict[str, Any] = {
        "quantization_config": BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type=quantization.type,
            bnb_4bit_use_double_quant=quantization.double_quantization,
            bnb_4bit_compute_dtype=folder.dtype,
            # The storage dtype of shards: FSDP2 flattens only what has the dtype of its neighbours.
            bnb_4bit_quant_storage=folder.dtype if folder.recipe.engine.name == "fsdp2" else torch.uint8,
        )
    }
    model = folder.load(**options)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for module in model.modules():
        # On CPUs with AVX512-BF16 the first evaluation would repack the weights for inference, for good: no
        # backward pass after that, and shards of another layout.
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    return model
