"""Write trained weights where PEFT and transformers expect them, and read them back before calling it done."""

import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from peft import PeftModel, get_peft_model_state_dict
from safetensors import safe_open
from safetensors.torch import save_file

from shardwise.errors import RunError
from shardwise.runs import RunFolder
from shardwise.training.engines.protocol import Engine
from shardwise.training.model import ModelFolder

# Files beside the weights that make a folder usable by itself.
TOKENIZER_FILES = ("tokenizer*", "special_tokens_map.json", "vocab*", "merges.txt", "*.jinja", "*.model")


def export(run: RunFolder, engine: Engine, folder: ModelFolder) -> Path | None:
    """Write adapter/ or model/ of a run (collective). Returns its path on rank 0, else None.

    Raises RunError when what was written differs from the trained weights.
    """
    weights = dict(engine.trained_weights())
    if engine.ranks.rank != 0:
        return None
    adapter = isinstance(engine.module.model, PeftModel)
    target = run.adapter_path if adapter else run.model_path
    work = target.with_name(target.name + ".writing")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    if adapter:
        _write_adapter(engine.module.model, weights, folder, work)  # type: ignore[arg-type]
    else:
        _write_model(weights, folder, work)
    for pattern in TOKENIZER_FILES:
        for file in folder.path.glob(pattern):
            shutil.copy2(file, work / file.name)
    if target.exists():
        shutil.rmtree(target)
    work.rename(target)
    return target


def _write_adapter(
    model: PeftModel, weights: Mapping[str, torch.Tensor], folder: ModelFolder, target: Path
) -> None:
    state = {
        key: value.contiguous()
        for key, value in get_peft_model_state_dict(model, state_dict=dict(weights)).items()
    }
    config = model.peft_config["default"]
    config.base_model_name_or_path = folder.recipe.model.source
    config.revision = folder.recipe.model.revision
    config.inference_mode = True
    config.save_pretrained(target)
    config.inference_mode = False
    save_file(state, target / "adapter_model.safetensors", metadata={"format": "pt"})
    _compare(target, state, {k: v.shape for k, v in state.items()}, len(weights))


def _write_model(weights: Mapping[str, torch.Tensor], folder: ModelFolder, target: Path) -> None:
    empty = folder.empty()
    shapes = {name: p.shape for name, p in empty.named_parameters()}
    missing = sorted(shapes.keys() - weights.keys())
    if missing:
        raise RunError(
            f"{len(missing)} weights are missing from the export, first: {missing[0]}",
            "the engine gave no trained copy of them",
            "the checkpoint is intact; please report this",
        )
    state = {name: value.to(folder.dtype) for name, value in weights.items()}
    wrong = [n for n, v in state.items() if v.shape != shapes[n] or v.numel() == 0]
    if wrong:
        raise RunError(
            f"exported weight {wrong[0]} has shape {tuple(state[wrong[0]].shape)}",
            f"the model's is {tuple(shapes[wrong[0]])}",
            "the checkpoint is intact; please report this",
        )
    empty.save_pretrained(target, state_dict=state)


def _compare(
    target: Path, state: Mapping[str, torch.Tensor], shapes: Mapping[str, torch.Size], n: int
) -> None:
    """Reopen the file and compare shape and value of every tensor."""
    with safe_open(target / "adapter_model.safetensors", framework="pt") as file:
        names = set(file.keys())
        bad = [k for k in names if not torch.equal(file.get_tensor(k), state[k]) or state[k].numel() == 0]
    if names != set(shapes) or bad or len(names) < n:
        raise RunError(
            f"the exported adapter in {target} does not hold what was trained",
            f"{len(names)} tensors of {n}, {len(bad)} differ",
            "the checkpoint is intact; please report this",
        )
