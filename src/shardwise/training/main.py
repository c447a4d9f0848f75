"""One rank of a run: `python -m shardwise.training.main RUN_FOLDER [--resume]`. Started by shardwise.launch."""

import os
import platform
import sys
import time
from datetime import timedelta
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardwise.data import Prepared, load_tokenizer, make_order, prepare
from shardwise.errors import CheckpointError, DivergedError, Interrupted, RunError, ShardwiseError
from shardwise.errors import OutOfMemoryError as DeviceMemoryError
from shardwise.recipe import Recipe, parse_recipe
from shardwise.runs import RunFolder
from shardwise.training import samples
from shardwise.training.build import build_engine
from shardwise.training.checkpoint.load import load
from shardwise.training.engines.protocol import Engine, Ranks
from shardwise.training.export.write import export
from shardwise.training.loop import Job, Stop, log_evaluation, train
from shardwise.training.meter import Meter, peak_resident_bytes
from shardwise.training.model import ModelFolder
from shardwise.training.progress import Bar

PACKAGES = ("shardwise", "torch", "transformers", "peft", "deepspeed", "bitsandbytes")


def main(arguments: list[str]) -> int:
    """Run one rank. Returns its exit code: 0 done, 1 failed, 2 refused, 75 stopped with its state saved."""
    run = RunFolder(Path(arguments[0]))
    stop = Stop()
    stop.install()
    ranks = Ranks(
        int(os.environ.get("RANK", 0)),
        int(os.environ.get("WORLD_SIZE", 1)),
        int(os.environ.get("LOCAL_RANK", 0)),
    )
    try:
        rank_main(run, ranks, stop, resume="--resume" in arguments)
    except ShardwiseError as problem:
        if ranks.rank == 0 or not isinstance(problem, Interrupted):
            print(str(problem), file=sys.stderr, flush=True)
        return problem.exit_code
    except torch.OutOfMemoryError as problem:
        error = DeviceMemoryError(
            f"rank {ranks.rank} ran out of device memory",
            str(problem).splitlines()[0],
            "lower training.micro_batch_size, set training.activation_checkpointing: full, or ask shardwise plan",
        )
        print(str(error), file=sys.stderr, flush=True)
        return error.exit_code
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return 0


def rank_main(run: RunFolder, ranks: Ranks, stop: Stop, resume: bool) -> None:
    """Everything one rank does, in order."""
    began = time.perf_counter()
    recipe = parse_recipe(run.recipe_text(), str(run.recipe_path))
    device = _device(recipe, ranks)
    torch.manual_seed(recipe.training.seed)
    folder = ModelFolder(Path(recipe.model.source), recipe)
    prepared = _prepared(recipe, folder)
    size, epochs = recipe.training.global_batch_size, recipe.training.epochs
    assert size != "auto"
    order = make_order(
        prepared.train,
        sequence_length=prepared.sequence_length,
        packing=recipe.data.packing,
        global_batch_size=size,
        epochs=epochs,
        max_steps=recipe.training.max_steps,
        seed=recipe.training.seed,
    )
    if ranks.world_size > 1:
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo", timeout=timedelta(minutes=30), device_id=None
        )
    micro = recipe.training.micro_batch_size
    assert micro != "auto"
    engine = build_engine(
        recipe, folder, device, ranks, len(order.micro_batches(0, 0, ranks.world_size, micro))
    )
    meter = Meter(engine)
    job = Job(run, recipe, engine, prepared.train, prepared.validation, order, meter, stop)
    start = _resume(run, engine) if resume else 0
    lead = ranks.rank == 0
    bar = Bar(order.steps, start, shown=lead)
    tokenizer = load_tokenizer(folder.path)
    prompts = samples.pick(prepared.validation, tokenizer, recipe.evaluation.samples)
    try:
        if lead:
            run.event("start", steps=order.steps, world_size=ranks.world_size, device=_device_name(device))
        before = log_evaluation(job, start, bar) if not start else None
        _sample(job, tokenizer, prompts, start, bar)
        totals = train(job, start, bar)
        after = log_evaluation(job, order.steps, bar)
        _sample(job, tokenizer, prompts, order.steps, bar)
        target = export(run, engine, folder)
    finally:
        bar.close()
        engine.close()
    if not lead:
        return
    measured = {
        "peak_allocated_bytes": meter.peak.bytes,
        "peak_reserved_bytes": meter.peak.reserved_bytes,
        "peak_phase": meter.peak.phase,
        "terms": meter.peak.terms,
        "peak_resident_bytes": peak_resident_bytes(),
        "training_seconds": totals.seconds,
        "tokens_per_second_per_gpu": totals.tokens / totals.seconds / ranks.world_size
        if totals.seconds
        else None,
        "method": meter.method,
    }
    run.write_summary(
        {
            "state": "done",
            "steps": order.steps,
            "seconds": {"total": time.perf_counter() - began, "training": totals.seconds},
            "tokens": totals.tokens,
            "trained_tokens": totals.trained_tokens,
            "loss_first": totals.loss_first,
            "loss_last": totals.loss_last,
            "evaluation_before": before if before is not None else _first_evaluation(run),
            "evaluation_after": after,
            "measured": measured,
            "samples": _pairs(run),
            "versions": versions(),
            "device": _device_name(device),
            "paths": {"result": str(target), "checkpoints": str(run.checkpoints_path)},
            "engine": engine.facts(),
        }
    )


def versions() -> dict[str, str]:
    """Python and the packages that decide numbers, as installed."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _device(recipe: Recipe, ranks: Ranks) -> torch.device:
    if recipe.engine.device == "cuda":
        torch.cuda.set_device(ranks.local_rank)
        return torch.device("cuda", ranks.local_rank)
    return torch.device("cpu" if recipe.engine.device == "auto" else recipe.engine.device)


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type} ({torch.get_num_threads()} threads)"


def _prepared(recipe: Recipe, folder: ModelFolder) -> Prepared:
    """The rows as the launcher prepared them: read from the cache, by the same key."""
    config = folder.config().get_text_config()
    return prepare(
        recipe.data,
        folder.path,
        revision=recipe.model.revision,
        chat_template=recipe.model.chat_template,
        max_length=getattr(config, "max_position_embeddings", None),
        vocabulary=config.vocab_size,
        seed=recipe.training.seed,
    )


def _resume(run: RunFolder, engine: Engine) -> int:
    """Load the newest checkpoint. Returns the number of steps done."""
    found = run.checkpoints()
    if not found:
        raise CheckpointError(
            f"{run.path} has no complete checkpoint",
            "there is nothing to resume from",
            "start the recipe anew",
        )
    newest = found[-1]
    load(newest.path, engine)
    if engine.ranks.rank == 0:
        run.event("resume", step=newest.step, path=str(newest.path))
        print(f"resumed from {newest.path} after step {newest.step}", file=sys.stderr, flush=True)
    return newest.step


def _sample(job: Job, tokenizer: Any, prompts: list[samples.Prompt], step: int, bar: Bar) -> None:
    if not prompts:
        return
    bar.say(f"answering {len(prompts)} held-out prompts ...")
    answers = samples.answer(job.engine, tokenizer, prompts, job.recipe.evaluation.max_new_tokens)
    if job.engine.ranks.rank == 0:
        for prompt, text in zip(prompts, answers, strict=True):
            job.run.event("sample", step=step, prompt=prompt.text, reference=prompt.reference, answer=text)


def _pairs(run: RunFolder) -> list[dict[str, Any]]:
    """Samples of the first and the last step, side by side."""
    found = [e.model_dump() for e in run.events("sample")]
    if not found:
        return []
    first, last = min(e["step"] for e in found), max(e["step"] for e in found)
    before = {e["prompt"]: e["answer"] for e in found if e["step"] == first}
    return [
        {
            "prompt": e["prompt"],
            "reference": e["reference"],
            "before": before.get(e["prompt"]),
            "after": e["answer"],
        }
        for e in found
        if e["step"] == last
    ]


def _first_evaluation(run: RunFolder) -> float | None:
    return next((e.model_dump()["loss"] for e in run.events("evaluation")), None)


__all__ = ["DivergedError", "RunError", "build_engine", "main"]

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
