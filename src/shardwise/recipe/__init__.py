"""What to run: one frozen tree <-> one YAML file <-> one JSON Schema.

Answers: what did the person ask for, and is it well-formed? Must not know: models, machines, engines, torch.
"""

from shardwise.recipe.load import apply_set, dump_recipe, load_recipe, parse_recipe
from shardwise.recipe.schema import AUTO, Recipe

__all__ = ["AUTO", "Recipe", "apply_set", "dump_recipe", "load_recipe", "parse_recipe"]
