"""What a rule is given and what it says."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Literal

from shardwise.recipe.schema import Recipe

PACKAGES = ("torch", "transformers", "peft", "bitsandbytes", "deepspeed", "flash-attn", "ninja")


@dataclass(frozen=True, slots=True)
class Problem:
    """Why a recipe cannot run. `key` is the one to change, `hint` the nearest legal choice."""

    rule: str
    key: str
    what: str
    why: str
    hint: str
    link: str


@dataclass(frozen=True, slots=True)
class Situation:
    """What the rules know about where a recipe would run; None: not known, and nothing is refused for it.

    `versions` holds installed packages only.
    """

    device: Literal["cuda", "cpu", "mps"] | None = None
    gpus: int | None = None
    gpu_capability: str | None = None  # "9.0"
    versions: Mapping[str, str] | None = field(default=None)

    def device_of(self, recipe: Recipe) -> str | None:
        """The device that a recipe would train on."""
        return self.device if recipe.engine.device == "auto" else recipe.engine.device

    def lacks(self, package: str) -> bool:
        return self.versions is not None and package not in self.versions

    def older(self, package: str, floor: tuple[int, ...]) -> str | None:
        """The installed version if it is older than `floor`."""
        found = (self.versions or {}).get(package)
        return found if found is not None and _numbers(found) < floor else None


def situation(
    device: Literal["cuda", "cpu", "mps"] | None = None,
    gpus: int | None = None,
    gpu_capability: str | None = None,
) -> Situation:
    """This installation, without importing any of the packages."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return Situation(device, gpus, gpu_capability, versions)


def _numbers(text: str) -> tuple[int, ...]:
    parts = []
    for part in text.partition("+")[0].split("."):
        digits = "".join(c for c in part if c.isdigit())
        if not digits:
            break
        parts.append(int(digits))
    return tuple(parts)
