"""What has to be installed, and how new."""

from collections.abc import Iterator

from shardwise.facts.model import ModelShape
from shardwise.recipe.schema import Recipe
from shardwise.rules.problem import Problem, Situation

# Older ones run code hidden in files that should hold only numbers, or lack what the engines use.
FLOORS = {
    "torch": ((2, 11), "https://github.com/pytorch/pytorch/security/advisories"),
    "transformers": ((5, 3), "https://github.com/huggingface/transformers/security/advisories"),
    "peft": ((0, 18), "https://github.com/huggingface/peft/releases"),
    "bitsandbytes": ((0, 48), "https://github.com/bitsandbytes-foundation/bitsandbytes/releases"),
    "deepspeed": ((0, 18), "https://github.com/deepspeedai/DeepSpeed/releases"),
}
EXTRAS = {"bitsandbytes": "qlora", "deepspeed": "deepspeed"}


def packages_are_there(recipe: Recipe, _: ModelShape | None, where: Situation) -> Iterator[Problem]:
    """Each choice that needs a package beyond torch, transformers and peft."""
    wants = {
        "bitsandbytes": ("method", "method: qlora") if recipe.method == "qlora" else None,
        "deepspeed": ("engine.name", "engine.name: deepspeed") if recipe.engine.name == "deepspeed" else None,
        "flash-attn": ("model.attention", "model.attention: flash_attention_2")
        if recipe.model.attention == "flash_attention_2"
        else None,
    }
    if recipe.optimizer.name.endswith("8bit") and wants["bitsandbytes"] is None:
        wants["bitsandbytes"] = ("optimizer.name", f"optimizer.name: {recipe.optimizer.name}")
    for package, want in wants.items():
        if want is None or not where.lacks(package):
            continue
        extra = EXTRAS.get(package)
        yield Problem(
            "packages_are_there",
            want[0],
            f"{want[1]} needs {package}",
            "the package is not installed",
            f"pip install 'shardwise[{extra}]'" if extra else f"pip install {package}",
            f"https://pypi.org/project/{package}/",
        )


def packages_are_new_enough(recipe: Recipe, _: ModelShape | None, where: Situation) -> Iterator[Problem]:
    """Version floors of what this recipe uses."""
    used = {"torch", "transformers"}
    used |= {"peft"} if recipe.method != "full" else set()
    used |= {"bitsandbytes"} if recipe.method == "qlora" or recipe.optimizer.name.endswith("8bit") else set()
    used |= {"deepspeed"} if recipe.engine.name == "deepspeed" else set()
    for package in sorted(used):
        floor, link = FLOORS[package]
        found = where.older(package, floor)
        if found is not None:
            wanted = ".".join(map(str, floor))
            yield Problem(
                "packages_are_new_enough",
                package,
                f"{package} {found} is too old",
                f"version {wanted} or newer is needed",
                f"pip install -U '{package}>={wanted}'",
                link,
            )


RULES = (packages_are_there, packages_are_new_enough)
