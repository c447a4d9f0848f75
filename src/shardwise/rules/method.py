"""Which method goes with what."""

from collections.abc import Iterator

from shardwise.facts.model import ModelShape
from shardwise.facts.shape import READ_AS_EXPERTS
from shardwise.recipe.schema import Recipe
from shardwise.rules.problem import Problem, Situation

BNB = "https://huggingface.co/docs/bitsandbytes/main/en/fsdp_qlora"
PEFT = "https://huggingface.co/docs/peft/main/en/developer_guides/lora"


def qlora_is_not_for_zero_3(recipe: Recipe, _: ModelShape | None, __: Situation) -> Iterator[Problem]:
    """A 4-bit weight is packed bytes plus constants of its own; ZeRO-3 flattens and gathers plain numbers."""
    if (
        recipe.method == "qlora"
        and recipe.engine.name == "deepspeed"
        and recipe.engine.deepspeed.zero_stage == 3
    ):
        yield Problem(
            "qlora_is_not_for_zero_3",
            "engine.name",
            "method: qlora with engine.name: deepspeed, zero_stage: 3",
            "ZeRO-3 does not split 4-bit weights: every rank would load the whole model first",
            "use engine.name: fsdp2, or ddp while the 4-bit model fits on each GPU",
            BNB,
        )


def quantised_base_is_frozen(recipe: Recipe, shape: ModelShape | None, __: Situation) -> Iterator[Problem]:
    """Full fine-tuning updates weights; stored integers have no gradient."""
    if recipe.method == "full" and shape is not None and shape.dtype in ("fp8", "int8", "nf4", "int4"):
        yield Problem(
            "quantised_base_is_frozen",
            "method",
            f"method: full on a model stored in {shape.dtype}",
            "quantised weights have no useful gradient; only adapters beside them can be trained",
            "use method: lora, or the 16-bit version of this model",
            BNB,
        )


def adapter_options_need_adapters(recipe: Recipe, _: ModelShape | None, __: Situation) -> Iterator[Problem]:
    """Options of adapters say nothing about full fine-tuning, and an ignored key is a lie."""
    if recipe.method != "full":
        return
    for key in ("rslora", "dora"):
        if getattr(recipe.lora, key):
            yield Problem(
                "adapter_options_need_adapters",
                f"lora.{key}",
                f"lora.{key}: true with method: full",
                "full fine-tuning has no adapter that it could change",
                f"delete lora.{key}, or use method: lora",
                PEFT,
            )


def names_of_experts_are_not_adapted(
    recipe: Recipe, shape: ModelShape | None, __: Situation
) -> Iterator[Problem]:
    """PEFT 0.21 maps these names to the experts of transformers 5, which lie in one tensor."""
    targets = recipe.lora.targets
    if recipe.method == "full" or shape is None or not shape.is_moe or isinstance(targets, str):
        return
    named = sorted(t for t in targets if t.rsplit(".", 1)[-1] in READ_AS_EXPERTS)
    if named:
        yield Problem(
            "names_of_experts_are_not_adapted",
            "lora.targets",
            f"lora.targets: {', '.join(named)} of a mixture of experts",
            "PEFT takes these names for the experts', and would train adapters on every expert instead",
            "use lora.targets: attention, or all-linear, which leaves them out",
            PEFT,
        )


RULES = (
    names_of_experts_are_not_adapted,
    qlora_is_not_for_zero_3,
    quantised_base_is_frozen,
    adapter_options_need_adapters,
)
