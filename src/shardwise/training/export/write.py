"""Write trained weights where PEFT and transformers expect them, and read them back before calling it done."""

import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from shardwise.errors import RunError
from shardwise.runs import RunFolder
from shardwise.training.engines.protocol import Engine, trained
from shardwise.training.export.origin import write_origin
from shardwise.training.model import ModelFolder

if TYPE_CHECKING:
    from peft import PeftModel

# Files beside the weights that make a folder usable by itself.
TOKENIZER_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges.txt",
    "*.jinja",
    "chat_template.json",
    "*.model",
    "generation_config.json",  # where an answer ends: not in config.json
)


def export(run: RunFolder, engine: Engine, folder: ModelFolder) -> Path | None:
    """Write adapter/ or model/ of a run (collective). Returns its path on rank 0, else None.

    Raises RunError when what was written differs from the trained weights.
    """
    weights = dict(engine.trained_weights())
    if engine.ranks.rank != 0:
        return None
    adapter = _has_adapter(engine.module.model)
    target = run.adapter_path if adapter else run.model_path
    work = target.with_name(target.name + ".writing")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    if adapter:
        write_adapter(engine.module.model, weights, folder, work)
    else:
        write_model(weights, folder, work)
    copy_tokenizer(folder.path, work)
    if target.exists():
        shutil.rmtree(target)
    work.rename(target)
    return target


def rehearse(run: RunFolder, engine: Engine, folder: ModelFolder) -> None:
    """Before the first step, everything of the last save but its bytes: names, shapes, config, tokenizer files.

    What would fail after hours fails now. Raises RunError; nothing is left behind.
    """
    model = engine.module.model
    adapted = _has_adapter(model)
    if not adapted:
        empty = folder.empty()
        whole = {name: tuple(p.shape) for name, p in empty.named_parameters()}
        # under ZeRO-3 a parameter is empty outside of its layer's forward, and DeepSpeed keeps its shape
        shapes = {n: tuple(getattr(p, "ds_shape", p.shape)) for n, p in trained(model)}
        wrong = {n: shape for n, shape in shapes.items() if whole.get(n) != shape}
        missing = sorted(whole.keys() - shapes.keys())
        if wrong or missing:
            raise RunError(
                f"the trained weights are not those of a saved model: {len(wrong) + len(missing)} names differ",
                f"first: {next(iter([*wrong, *missing]))}",
                "please report this with the model's config.json",
            )
    if engine.ranks.rank != 0:
        return
    work = run.path / ".rehearsal"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    try:
        if adapted:
            model.peft_config["default"].save_pretrained(work)
        else:
            name = next(iter(whole))
            empty.save_pretrained(work, state_dict={name: torch.zeros(1)})
        copy_tokenizer(folder.path, work)
    except (OSError, ValueError) as problem:
        raise RunError(
            "the result of this run could not be saved at its end",
            str(problem).splitlines()[0] if str(problem) else type(problem).__name__,
            f"look at the configuration files in {folder.path}",
        ) from None
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _has_adapter(model: Any) -> bool:
    """PEFT takes a second to import: a model that PEFT made has imported it."""
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(model, peft.PeftModel)


def copy_tokenizer(source: Path, target: Path) -> None:
    """The files that make a folder of weights usable by itself."""
    for pattern in TOKENIZER_FILES:
        for file in source.glob(pattern):
            shutil.copy2(file, target / file.name)


def write_adapter(
    model: "PeftModel", weights: Mapping[str, torch.Tensor], folder: ModelFolder, target: Path
) -> None:
    """PEFT's adapter folder, and beside it which base it belongs to. Read back before it returns."""
    from peft import get_peft_model_state_dict

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
    write_origin(target, folder)
    _compare(target, state, len(weights))


def write_model(weights: Mapping[str, torch.Tensor], folder: ModelFolder, target: Path) -> None:
    """transformers' model folder in the run's compute dtype. Read back before it returns."""
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
    _compare(target, {n: v for n, v in state.items() if n in shapes}, len(shapes))


def _compare(target: Path, state: Mapping[str, torch.Tensor], count: int) -> None:
    """Reopen the files and compare shape and value of every tensor."""
    found: dict[str, torch.Tensor] = {}
    for path in target.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            found.update({key: file.get_tensor(key) for key in file.keys()})  # noqa: SIM118
    bad = [k for k, v in state.items() if k not in found or v.numel() == 0 or not torch.equal(found[k], v)]
    if bad or len(found) < count:
        raise RunError(
            f"what was written to {target} is not what was trained",
            f"{len(found)} tensors of {count}, {len(bad)} differ" + (f", first: {bad[0]}" if bad else ""),
            "the checkpoint is intact; please report this",
        )
