"""All rules over one recipe."""

from collections.abc import Callable, Iterator

from shardwise.errors import RuleError
from shardwise.facts.model import ModelShape
from shardwise.recipe.schema import Recipe
from shardwise.rules import device, engine, installed, method, model
from shardwise.rules.problem import Problem, Situation, situation

Rule = Callable[[Recipe, ModelShape | None, Situation], Iterator[Problem]]
RULES: tuple[Rule, ...] = (*engine.RULES, *method.RULES, *device.RULES, *model.RULES, *installed.RULES)


def problems(recipe: Recipe, shape: ModelShape | None, where: Situation | None = None) -> list[Problem]:
    """Everything that keeps a recipe from running, in the order of RULES. `auto` is never a problem."""
    where = where or Situation()
    return [found for rule in RULES for found in rule(recipe, shape, where)]


def check(recipe: Recipe, shape: ModelShape | None, where: Situation | None = None) -> None:
    """Raise one RuleError that tells all problems; `where` None: this installation, whatever its device."""
    found = problems(recipe, shape, where or situation())
    if not found:
        return
    if len(found) == 1:
        only = found[0]
        raise RuleError(only.what, f"{only.why} ({only.link})", only.hint)
    told = [f"{p.what}: {p.why} ({p.link}); {p.hint}" for p in found]
    raise RuleError(
        f"the recipe breaks {len(found)} rules",
        "\n       ".join(told),
        f"change {', '.join(dict.fromkeys(p.key for p in found))}",
    )
