"""From a recipe and a model folder to a live engine."""

from functools import partial
from typing import Any

import torch

from shardwise.recipe import Recipe
from shardwise.training.compiling import compile_layers
from shardwise.training.engines.protocol import Engine, Ranks
from shardwise.training.hollow import fill, hollow_model
from shardwise.training.model import ModelFolder, prepare_for_training


def build_engine(
    recipe: Recipe, folder: ModelFolder, device: torch.device, ranks: Ranks, accumulation_steps: int
) -> Engine:
    """The engine that the recipe names, over a model that has been loaded and, for adapters, adapted."""
    hollow = hollow_model(folder) if _streams(recipe) else None
    model: Any = hollow if hollow is not None else _base(recipe, folder)
    if recipe.method != "full":
        from shardwise.training.adapters.lora import adapt

        model = adapt(model, recipe.lora, recipe.training.seed)
    module = prepare_for_training(model, recipe)
    if recipe.training.compile:
        compile_layers(module)
    name = recipe.engine.name
    if name == "ddp":
        from shardwise.training.engines.ddp import DdpEngine

        return DdpEngine(module, recipe, device, ranks, accumulation_steps > 1)
    if name == "fsdp2":
        from shardwise.training.engines.fsdp2 import Fsdp2Engine

        engine = Fsdp2Engine(module, recipe, device, ranks, accumulation_steps > 1)
        if hollow is not None:
            fill(module.model, folder)
        return engine
    if name == "deepspeed":
        from shardwise.training.engines.deepspeed import DeepSpeedEngine

        read = partial(fill, module.model, folder) if hollow is not None else None
        return DeepSpeedEngine(module, recipe, device, ranks, accumulation_steps, read)
    from shardwise.training.engines.single import SingleEngine

    return SingleEngine(module, recipe, device, accumulation_steps > 1)


def _streams(recipe: Recipe) -> bool:
    """Weights that are only split: not those that are quantised, or whose norms DoRA needs, while they load."""
    engine = recipe.engine
    splits = engine.name == "fsdp2" or (engine.name == "deepspeed" and engine.deepspeed.zero_stage == 3)
    return splits and recipe.method != "qlora" and not recipe.lora.dora


def _base(recipe: Recipe, folder: ModelFolder) -> Any:
    if recipe.method == "qlora":
        from shardwise.training.adapters.qlora import load_quantised

        return load_quantised(folder, recipe.quantization)
    return folder.load()
