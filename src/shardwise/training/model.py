"""A causal language model whose forward takes a packed micro-batch and returns the sum of its loss."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from shardwise.errors import ModelError, RuleError
from shardwise.recipe.schema import Recipe
from shardwise.training import attention as _documents
from shardwise.training.batches import MicroBatch
from shardwise.training.kernels.install import Installed, install
from shardwise.training.layers import decoder_layers
from shardwise.training.loss import chunked_cross_entropy, full_cross_entropy

# Keys by which families scale their logits, and whether the logits are multiplied or divided by the value.
_SCALES = {"logit_scale": 1, "logits_scaling": -1, "lm_head_multiplier": 1}
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


class LossModel(nn.Module):
    """Wraps a transformers model, so that engines shard, wrap and call one module whose output is a scalar."""

    def __init__(self, model: nn.Module, loss: str) -> None:
        super().__init__()
        self.model = model
        self.on_loss: Callable[[], None] = lambda: None  # told when the head and the loss begin
        base = self.causal_lm
        self.decoder = base.get_decoder
        self.chunked = loss == "chunked" and isinstance(base.get_output_embeddings(), nn.Linear)
        config = base.config.get_text_config()
        self.softcap: float | None = getattr(config, "final_logit_softcapping", None)
        self.kernels = Installed()
        self.scale = 1.0
        for key, power in _SCALES.items():
            if getattr(config, key, None):
                self.scale *= float(getattr(config, key)) ** power

    @property
    def causal_lm(self) -> PreTrainedModel:
        """The transformers model, out of PEFT's wrapper if there is one."""
        inner = self.model
        return inner.get_base_model() if hasattr(inner, "get_base_model") else inner

    def forward(self, batch: MicroBatch) -> torch.Tensor:
        """Sum over the micro-batch's targets of -log p(target), a scalar in fp32."""
        inputs = {
            "input_ids": batch.input_ids,
            "position_ids": batch.position_ids,
            "use_cache": False,
            **_attention_arguments(batch, self.causal_lm.config._attn_implementation),
        }
        if not self.chunked:
            logits_BTV = self.model(**inputs).logits
            if batch.trained_tokens == 0:
                return logits_BTV.float().sum() * 0
            return full_cross_entropy(logits_BTV[0].index_select(0, batch.positions), batch.targets)
        hidden_TH = self.decoder()(**inputs).last_hidden_state[0]
        self.on_loss()
        # Also without any label: every parameter then gets a gradient of 0, which DDP's reducer waits for.
        head = self.causal_lm.get_output_embeddings()
        return chunked_cross_entropy(
            hidden_TH.index_select(0, batch.positions), head.weight, batch.targets, self.scale, self.softcap
        )


def _attention_arguments(batch: MicroBatch, implementation: str) -> dict[str, Any]:
    """What tells this implementation where documents end."""
    if implementation == _documents.NAME:
        return {"document_lengths": _documents.Documents(batch.document_lengths)}
    if implementation.startswith("flash_attention"):
        ends = torch.tensor((0, *batch.document_lengths), device=batch.input_ids.device).cumsum(0).int()
        longest = max(batch.document_lengths)
        return {
            "cu_seq_lens_q": ends,
            "cu_seq_lens_k": ends,
            "max_length_q": longest,
            "max_length_k": longest,
        }
    return {}  # eager, sdpa and flex build a block mask from position_ids that restart


@dataclass(frozen=True)
class ModelFolder:
    """Where a model's files lie, and how it is to be built. Building is the engines' choice."""

    path: Path
    recipe: Recipe

    @property
    def dtype(self) -> torch.dtype:
        if self.recipe.training.precision == "auto":
            raise RuleError(
                "precision is still 'auto'", "a run needs a decided dtype", "resolve the recipe first"
            )
        return DTYPES[self.recipe.training.precision]

    @property
    def attention(self) -> str:
        """The implementation's name for transformers; `auto` and `sdpa` are per-document SDPA."""
        asked = self.recipe.model.attention
        return _documents.NAME if asked in ("auto", "sdpa") else asked

    def config(self) -> PretrainedConfig:
        """Raises ModelError when the folder wants to run its own code and that was not allowed."""
        trust = self.recipe.model.trust_remote_code
        file = self.path / "config.json"
        if file.is_file() and "auto_map" in json.loads(file.read_text()) and not trust:
            raise ModelError(
                f"{self.path} brings its own Python code (auto_map in config.json)",
                "code of a downloaded model is not run unless you say so",
                "read the code, then set model.trust_remote_code: true",
            )
        return AutoConfig.from_pretrained(self.path, trust_remote_code=trust)

    def load(self, **options: Any) -> PreTrainedModel:
        """The model with its weights, in compute dtype, on the CPU unless `options` say otherwise."""
        config = self.config()
        model = AutoModelForCausalLM.from_pretrained(
            self.path,
            config=config,
            dtype=self.dtype,
            attn_implementation=self.attention,
            trust_remote_code=self.recipe.model.trust_remote_code,
            use_safetensors=True,
            **options,
        )
        return model

    def empty(self) -> PreTrainedModel:
        """The same model on the meta device: shapes and dtypes, no bytes."""
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(
                self.config(), dtype=self.dtype, attn_implementation=self.attention
            )


def prepare_for_training(model: nn.Module, recipe: Recipe) -> LossModel:
    """Put in kernels, switch on training mode and activation checkpointing, and wrap the model with its loss."""
    installed = install(model)
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    base.config.use_cache = False
    kind = recipe.training.activation_checkpointing
    if kind != "none":
        options: dict[str, Any] = {"use_reentrant": False}
        if kind == "selective":
            options["context_fn"] = _selective
        base.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
    model.train()
    loss = "chunked" if recipe.training.loss == "auto" else recipe.training.loss
    wrapped = LossModel(model, loss)
    wrapped.kernels = installed
    if isinstance(kind, int):
        _checkpoint_only(decoder_layers(wrapped), kind)
    return wrapped


def _checkpoint_only(layers: list[nn.Module], count: int) -> None:
    """Leave checkpointing on in the first `count` layers.

    The first, because the backward pass comes to them when what the others kept is gone: the one layer's activations
    that a recomputation brings back then never lie on top of the peak. Raises RuleError where a model has fewer.
    """
    if count > len(layers):
        raise RuleError(
            f"training.activation_checkpointing: {count} on a model of {len(layers)} layers",
            "there are not so many to recompute",
            f"use a number up to {len(layers)}, or full",
        )
    if not all(hasattr(layer, "gradient_checkpointing") for layer in layers):
        raise RuleError(
            f"training.activation_checkpointing: {count} on this model",
            "its layers do not let checkpointing be chosen one by one",
            "use none or full",
        )
    for layer in layers[count:]:
        layer.gradient_checkpointing = False


# Kept in the forward pass under selective checkpointing: attention, which is the dearest to recompute per byte.
# Everything else of a layer is recomputed.
_KEPT = {
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.shardwise.document_attention.default,
}


def _selective() -> Any:
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    def policy(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)
