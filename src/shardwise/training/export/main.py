"""`python -m shardwise.training.export.main RUN --to KIND --output PATH ...`; started by the command line."""

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging

from shardwise.errors import RunError, ShardwiseError, UsageError
from shardwise.recipe import Recipe, parse_recipe
from shardwise.runs import RunFolder
from shardwise.runs.checkpoints import INDEX, best, chosen
from shardwise.runs.jsonfile import read_json
from shardwise.training.checkpoint.pieces import Reader
from shardwise.training.export.card import card
from shardwise.training.export.compare import Difference, difference, logits
from shardwise.training.export.gguf_file import write_gguf
from shardwise.training.export.origin import origin_of, with_adapter
from shardwise.training.export.write import copy_tokenizer, write_adapter, write_model
from shardwise.training.model import ModelFolder
from shardwise.training.rows import prepared_rows

ROWS, TOKENS = 4, 128  # of the run's rows, on which logits are compared
# Largest relative difference of logits that rounding explains; beyond it the export is no good.
LIMITS = {"fp32": 1e-4, "bf16": 3e-2, "f16": 3e-2, "q8_0": 0.15}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("run", type=Path)
    parser.add_argument("--to", choices=("adapter", "merged", "gguf", "full"), required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--type", choices=("f16", "q8_0", "bf16", "fp32"))
    parser.add_argument("--checkpoint")
    given = parser.parse_args(arguments)
    work = given.output.with_name(given.output.name + ".writing")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        print(export_run(RunFolder(given.run), given.to, work, given.type, given.checkpoint))
        work.rename(given.output)
        print(given.output)
    except ShardwiseError as problem:
        print(problem, file=sys.stderr)
        return problem.exit_code
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return 0


def export_run(run: RunFolder, to: str, work: Path, kind: str | None, checkpoint: str | None) -> str:
    """Write one export into the folder `work`, read it back, compare. Returns what the comparison said.

    `kind`: number type of the weights; None: f16 for gguf, bf16 for merged, the run's own for full.

    Raises UsageError for what this run cannot be exported to, RunError when the copy is not the original.
    """
    recipe = parse_recipe(run.recipe_text(), str(run.recipe_path))
    folder = ModelFolder(Path(recipe.model.source), recipe)
    full = recipe.method == "full"
    if full and to == "adapter":
        raise UsageError(
            f"run '{run.name}' trained all weights", "there is no adapter", "use --to full or --to gguf"
        )
    if not full and to == "full":
        raise UsageError(
            f"run '{run.name}' trained an adapter ({recipe.method})",
            "its base was not changed",
            "use --to merged for one whole model, or --to adapter",
        )
    kind = _number_type(to, kind, recipe)
    trained = as_trained(run, recipe, folder, checkpoint)
    rows = sample_rows(recipe, folder)
    wanted = logits(trained, rows)
    origin = origin_of(folder)
    if to == "adapter":
        write_adapter(trained, _adapter_weights(trained), folder, work)
        again = with_adapter(_base(recipe, folder), work, folder.path)
        note = _told(difference(wanted, logits(again, rows)), LIMITS["fp32"], "read back")
    elif to == "gguf":
        whole, precision = work / "whole", recipe.training.precision
        merged, note = _write_whole(trained, recipe, folder, whole, rows, wanted, precision)
        note = _to_gguf(work, whole, kind, run.name, merged, rows)
    else:
        _, note = _write_whole(trained, recipe, folder, work, rows, wanted, kind)
    if to != "gguf":
        copy_tokenizer(folder.path, work)
    (work / "README.md").write_text(card(run, recipe, origin, to, note), encoding="utf-8")
    return note


def _number_type(to: str, kind: str | None, recipe: Recipe) -> str:
    """What --type means for this kind of export. Raises UsageError where it does not go with it."""
    known = {"adapter": (), "gguf": ("f16", "q8_0"), "merged": ("bf16", "fp32"), "full": ("bf16", "fp32")}[to]
    if kind is not None and kind not in known:
        raise UsageError(
            f"--type {kind} does not go with --to {to}",
            f"{to} is written as {' or '.join(known)}"
            if known
            else "an adapter is written as it was trained",
            f"use --type {known[0]}" if known else "leave --type out",
        )
    return kind or {"gguf": "f16", "merged": "bf16"}.get(to, recipe.training.precision)


def _to_gguf(work: Path, whole: Path, kind: str, name: str, merged: Any, rows: Any) -> str:
    file = work / f"{name}-{kind}.gguf"
    # transformers 5.24 takes a Llama file with this word in its name for an architecture that gguf does not know
    write_gguf(whole, file, kind, name if "mistral" not in name.lower() else "shardwise")
    again, how = _read_gguf(file, merged.config)
    found = difference(logits(merged.float(), rows), logits(again, rows))
    shutil.rmtree(whole)
    return _told(found, LIMITS[kind], f"{file.name} read back with transformers{how}")


def _read_gguf(file: Path, config: Any) -> tuple[Any, str]:
    """The model in a GGUF file, and how it was read: transformers leaves out head sizes of some families."""
    from transformers import AutoModelForCausalLM

    options: dict[str, Any] = {"gguf_file": file.name, "dtype": torch.float32}
    try:
        return AutoModelForCausalLM.from_pretrained(file.parent, **options), ""
    except (RuntimeError, ValueError, NotImplementedError):
        again = AutoModelForCausalLM.from_pretrained(file.parent, config=config, **options)
        return again, " and the model's own config.json, which its reader needs for this shape"


def _told(found: Difference, limit: float, what: str) -> str:
    if not found.relative <= limit:
        raise RunError(
            f"the export is not the trained model: {found}",
            f"rounding explains at most {limit:g}",
            "nothing was left behind; please report this with the recipe",
        )
    return f"{what}: {found}"


def as_trained(run: RunFolder, recipe: Recipe, folder: ModelFolder, checkpoint: str | None) -> Any:
    """The model exactly as it was trained (4-bit base for qlora), with the run's result or a checkpoint's weights."""
    result = run.result_path
    if checkpoint is None and result is not None:
        if recipe.method == "full":
            return ModelFolder(result, recipe).load().eval()
        return with_adapter(_base(recipe, folder), result, folder.path).eval()
    model = _base(recipe, folder)
    if recipe.method != "full":
        from shardwise.training.adapters.lora import adapt

        model = adapt(model, recipe.lora, recipe.training.seed)
    fill(model, run, checkpoint)
    return model.eval()


@torch.no_grad()
def fill(model: Any, run: RunFolder, checkpoint: str | None) -> int:
    """Put a verified checkpoint's weights into a model. Returns its step. `checkpoint`: see `step_of`."""
    found, _ = chosen(run, step_of(run, checkpoint))
    reader = Reader(found.path, read_json(found.path / INDEX) or {"tensors": {}, "values": {}})
    parameters = dict(model.named_parameters())
    for key in reader.tensors:
        if key.startswith("weights|"):
            reader.fill(key, parameters[key.removeprefix("weights|")])
    return found.step


def step_of(run: RunFolder, checkpoint: str | None) -> int | None:
    """What --checkpoint means: a step, best, last (None: the newest good one). Raises UsageError."""
    if checkpoint in (None, "last", "latest"):
        return None
    if checkpoint == "best":
        top = best(run)
        if top is None:
            raise UsageError(
                f"run '{run.name}' has no best checkpoint",
                "none of those that are there was evaluated on held-out rows at its own step",
                "give a step or last; next time set evaluation.every_steps to a divisor of checkpoint.every_steps",
            )
        return top.step
    if not str(checkpoint).isdigit():
        raise UsageError(f"--checkpoint {checkpoint}", "it names no checkpoint", "give a step, best or last")
    return int(str(checkpoint))


def _base(recipe: Recipe, folder: ModelFolder) -> Any:
    if recipe.method == "qlora":
        from shardwise.training.adapters.qlora import load_quantised

        return load_quantised(folder, recipe.quantization)
    return folder.load()


def _adapter_weights(model: Any) -> dict[str, torch.Tensor]:
    return {name: p.detach().cpu() for name, p in model.named_parameters() if "lora_" in name}


def _write_whole(
    trained: Any,
    recipe: Recipe,
    folder: ModelFolder,
    target: Path,
    rows: Sequence[Sequence[int]],
    wanted: Sequence[torch.Tensor],
    precision: str,
) -> tuple[Any, str]:
    """One model without adapters in `precision`, adapters merged into the base of the same. Returns it, read back,
    and what the comparison said. What was trained on a 4-bit base is held against the unmerged adapter on the
    16-bit base, and the difference to the trained model is told.
    """
    training = recipe.training.model_copy(update={"precision": precision})
    ours = recipe.model_copy(update={"training": training})
    source = ModelFolder(folder.path, ours)
    target.mkdir(parents=True, exist_ok=True)
    reference = wanted
    if recipe.method == "full":
        write_model({n: p.detach().cpu() for n, p in trained.named_parameters()}, source, target)
    else:
        from peft import get_peft_model_state_dict, set_peft_model_state_dict

        from shardwise.training.adapters.lora import adapt

        merged: Any = adapt(source.load(), recipe.lora, recipe.training.seed)
        set_peft_model_state_dict(merged, get_peft_model_state_dict(trained))
        if recipe.method == "qlora":
            reference = logits(merged, rows)
        merged.merge_and_unload(safe_merge=True).save_pretrained(target)
    copy_tokenizer(folder.path, target)
    again = ModelFolder(target, ours).load()
    written = logits(again, rows)
    limit = max(LIMITS[precision], LIMITS[recipe.training.precision])
    note = f"{precision}, {_told(difference(reference, written), limit, 'read back')}"
    if recipe.method == "qlora":
        note += f"; merged into the 16-bit base, to the 4-bit base it was trained on {difference(wanted, written)}"
    return again, note


def sample_rows(recipe: Recipe, folder: ModelFolder) -> Sequence[Sequence[int]]:
    """Beginnings of the run's own rows; random tokens when its data is not there any more."""
    try:
        prepared = prepared_rows(folder, recipe.data)
        rows = (
            prepared.validation
            if prepared.validation is not None and len(prepared.validation)
            else prepared.train
        )
        return [rows.row(i)[0][:TOKENS].tolist() for i in range(min(ROWS, len(rows)))]
    except (ShardwiseError, OSError):
        vocabulary, draw = folder.config().get_text_config().vocab_size, torch.Generator().manual_seed(0)
        return [torch.randint(0, vocabulary, (64,), generator=draw).tolist() for _ in range(ROWS)]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
