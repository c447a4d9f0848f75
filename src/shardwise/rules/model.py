"""What a model's architecture forbids."""

from collections.abc import Iterator

from shardwise.facts.model import ModelShape
from shardwise.recipe.schema import Recipe
from shardwise.rules.problem import Problem, Situation

SINK_FAMILIES = ("gpt_oss",)  # a learned logit per head takes part in the softmax


def foreign_code_needs_consent(recipe: Recipe, shape: ModelShape | None, _: Situation) -> Iterator[Problem]:
    """A downloaded folder must not run its own Python unasked."""
    if shape is not None and shape.needs_own_code and not recipe.model.trust_remote_code:
        yield Problem(
            "foreign_code_needs_consent",
            "model.trust_remote_code",
            f"{recipe.model.source} brings its own Python code (auto_map in config.json)",
            "code of a downloaded model is not run unless you say so",
            "read that code, then set model.trust_remote_code: true",
            "https://huggingface.co/docs/transformers/main/en/models#custom-models",
        )


def attention_sinks_need_their_kernel(
    recipe: Recipe, shape: ModelShape | None, _: Situation
) -> Iterator[Problem]:
    """Attention sinks are not in every kernel."""
    if shape is None:
        return
    sink = shape.model_type in SINK_FAMILIES
    if sink and recipe.model.attention == "flash_attention_2":
        yield Problem(
            "attention_sinks_need_their_kernel",
            "model.attention",
            f"model.attention: flash_attention_2 with {shape.model_type}",
            "FlashAttention 2 has no attention sinks",
            "use model.attention: sdpa, eager or flex_attention",
            "https://huggingface.co/openai/gpt-oss-20b",
        )


def sequences_within_positions(recipe: Recipe, shape: ModelShape | None, _: Situation) -> Iterator[Problem]:
    """Beyond what it was built for, a model has seen no position."""
    length = recipe.data.sequence_length
    if shape is None or not isinstance(length, int) or not shape.max_position_embeddings:
        return
    if length > shape.max_position_embeddings and not recipe.data.packing:
        yield Problem(
            "sequences_within_positions",
            "data.sequence_length",
            f"data.sequence_length: {length} on a model built for {shape.max_position_embeddings} tokens",
            "positions beyond that have no meaning to it",
            f"use data.sequence_length: {shape.max_position_embeddings}",
            "https://arxiv.org/abs/2104.09864",
        )


def fused_experts_stay_in_16_bits(
    recipe: Recipe, shape: ModelShape | None, _: Situation
) -> Iterator[Problem]:
    """Experts that are one fused tensor are not linear layers: nothing of them would be quantised."""
    if shape is None or recipe.method != "qlora" or not shape.is_moe:
        return
    experts = shape.count("expert")
    if experts > shape.quantised_parameters:
        share = experts / shape.total_parameters
        yield Problem(
            "fused_experts_stay_in_16_bits",
            "method",
            f"method: qlora on {recipe.model.source}, whose experts are {share:.0%} of its parameters",
            "its experts are fused tensors, which bitsandbytes leaves in 16 bits: almost nothing would shrink",
            "use method: lora with engine.name: fsdp2",
            "https://huggingface.co/docs/bitsandbytes/main/en/reference/nn/linear4bit",
        )


def no_more_recomputed_than_layers(
    recipe: Recipe, shape: ModelShape | None, _: Situation
) -> Iterator[Problem]:
    """A number of layers to recompute is at most what the model has."""
    count = recipe.training.activation_checkpointing
    if shape is not None and isinstance(count, int) and count > shape.num_hidden_layers:
        yield Problem(
            "no_more_recomputed_than_layers",
            "training.activation_checkpointing",
            f"training.activation_checkpointing: {count} on a model of {shape.num_hidden_layers} layers",
            "there are not so many to recompute",
            f"use training.activation_checkpointing: {shape.num_hidden_layers} or less, or full",
            "https://arxiv.org/abs/1604.06174",
        )


RULES = (
    foreign_code_needs_consent,
    attention_sinks_need_their_kernel,
    sequences_within_positions,
    fused_experts_stay_in_16_bits,
    no_more_recomputed_than_layers,
)
