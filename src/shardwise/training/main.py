"""One rank of a run, from its recipe to its summary. `__main__` starts it."""

import errno
import math
import os
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardwise.data import Documents, Feed, end_ids, load_tokenizer, run_order
from shardwise.data.identity import rows_digest, train_digest
from shardwise.errors import DiskFullError, Interrupted, ShardwiseError
from shardwise.errors import OutOfMemoryError as DeviceMemoryError
from shardwise.facts.versions import installed_versions
from shardwise.facts.weights import weights_digest
from shardwise.recipe import Recipe, parse_recipe
from shardwise.runs import RunFolder
from shardwise.runs.changes import Change, accepted_of, check, compare, facts
from shardwise.runs.checkpoints import Skipped, best, chosen, facts_of, pass_over, sha256
from shardwise.runs.effective import effective
from shardwise.training import checks, samples
from shardwise.training.adapters.peft_import import import_peft
from shardwise.training.build import build_engine
from shardwise.training.checkpoint.load import load
from shardwise.training.engines.protocol import Engine, Ranks
from shardwise.training.export.write import export, rehearse
from shardwise.training.loop import Job, Stop, log_evaluation, train
from shardwise.training.meter import Meter, peak_resident_bytes
from shardwise.training.model import ModelFolder
from shardwise.training.progress import Bar
from shardwise.training.rows import StreamFeed, account_text, prepared_rows, stream_feed
from shardwise.training.terminal import keep_clean
from shardwise.training.watch import END_SECONDS, SAVE_SECONDS, Watch


def main(arguments: list[str]) -> int:
    """Run one rank. Returns its exit code: 0 done, 1 failed, 2 refused, 75 stopped with its state saved."""
    run = RunFolder(Path(arguments[0]))
    keep_clean()
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
            _say(problem)
        return problem.exit_code
    except OSError as problem:
        if problem.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        full = DiskFullError(
            f"nothing more can be written to {run.path}: the disk is full",
            f"{problem.filename or 'its events'} (rank {ranks.rank}): {problem.strerror}",
            f"make room there; checkpoints are intact: continue with shardwise train --resume {run.path}",
        )
        _say(full)
        return full.exit_code
    except torch.OutOfMemoryError as problem:
        error = DeviceMemoryError(
            f"rank {ranks.rank} ran out of device memory",
            str(problem).splitlines()[0],
            "lower training.micro_batch_size, set training.activation_checkpointing: full, or ask shardwise plan",
        )
        _say(error)
        return error.exit_code
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return 0


def _say(problem: ShardwiseError) -> None:
    with suppress(OSError):  # the log may be on a full disk; the exit code still tells
        print(str(problem), file=sys.stderr, flush=True)


def rank_main(run: RunFolder, ranks: Ranks, stop: Stop, resume: bool) -> None:
    """Everything one rank does, in order."""
    began = time.perf_counter()
    recipe = parse_recipe(run.recipe_text(), str(run.recipe_path))
    watch = Watch(run.logs_path, ranks.rank, recipe.checkpoint.hang_seconds)
    device = _device(recipe, ranks)
    torch.manual_seed(recipe.training.seed)
    folder = ModelFolder(Path(recipe.model.source), recipe)
    prepared = prepared_rows(folder, recipe.data)
    size = recipe.training.global_batch_size
    assert size != "auto"
    if ranks.world_size > 1:
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo", timeout=timedelta(minutes=30), device_id=None
        )
    micro = recipe.training.micro_batch_size
    assert micro != "auto"
    order = None if prepared.stream else run_order(prepared.train, recipe, prepared.sequence_length, size)
    if recipe.method != "full":
        import_peft(quantised=recipe.method == "qlora")
    each = math.ceil((size if order is None else len(order.step(0))) / ranks.world_size)
    engine = build_engine(recipe, folder, device, ranks, math.ceil(each / micro))
    meter = Meter(engine)
    made_by = facts(
        recipe.model_dump(mode="json"),
        train_digest(prepared),
        rows_digest(prepared.validation),
        weights_digest(folder.path),
        installed_versions(),
    )
    rehearse(run, engine, folder)
    start = _resume(run, engine, made_by) if resume else 0
    stream: StreamFeed | None = None
    if order is None:
        position = facts_of(run.checkpoint_path(start)).get("data_position") if start else None
        stream = stream_feed(prepared, recipe, ranks, device, position, lambda: watch.beat(start + 1, "rows"))
    feed: Feed = order or stream  # type: ignore[assignment]
    documents: Documents = stream or prepared.train
    job = Job(run, recipe, engine, documents, prepared.validation, feed, meter, stop, made_by, watch)
    lead = ranks.rank == 0
    bar = Bar(feed.steps, start, shown=lead)
    asked = recipe.evaluation.samples if prepared.validation is not None else 0
    tokenizer = load_tokenizer(folder.path) if asked else None
    prompts = samples.pick(prepared.validation, tokenizer, asked)
    try:
        if lead:
            run.track(recipe.run.tracking, recipe.model_dump(mode="json"))
            _explain_best(run, recipe)
            _record_code(run, folder)
            live = checks.live(engine)
            print(checks.kernels_told(live["kernels"]), file=sys.stderr, flush=True)
            run.event(
                "start", steps=feed.steps, world_size=ranks.world_size, device=_device_name(device), **live
            )
        before = log_evaluation(job, start, bar) if not start else None
        watch.beat(start, "samples", SAVE_SECONDS)
        _sample(job, tokenizer, prompts, start, bar)
        totals = train(job, start, bar)
        after = totals.evaluation if start < feed.steps else log_evaluation(job, feed.steps, bar)
        watch.beat(feed.steps, "export", SAVE_SECONDS)
        _sample(job, tokenizer, prompts, feed.steps, bar)
        target = export(run, engine, folder)
        streamed = stream.account(feed.steps) if stream else None
    finally:
        watch.beat(0, "end", END_SECONDS)
        bar.close()
        if stream is not None:
            stream.close()
        engine.close()
    if not lead:
        return
    kept, top = [c.step for c in run.checkpoints()], best(run)
    removed = [step for e in run.events("checkpoint") for step in e.model_dump().get("removed", [])]
    if removed:
        told = f"checkpoints of steps {', '.join(map(str, kept))} are kept"
        told += f" (best: {top.step})" if top else ""
        print(f"{told}; removed on the way: {', '.join(map(str, removed))}", file=sys.stderr, flush=True)
    if streamed is not None:
        print(account_text(streamed), file=sys.stderr, flush=True)
    spent = effective(run)
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
            "steps": feed.steps,
            "seconds": {"total": time.perf_counter() - began, "training": totals.seconds},
            "tokens": totals.tokens,
            "trained_tokens": totals.trained_tokens,
            "loss_first": totals.loss_first,
            "loss_last": totals.loss_last,
            "evaluation_before": before if before is not None else _first_evaluation(run),
            "evaluation_after": after,
            "measured": measured,
            "samples": _pairs(run),
            "versions": installed_versions(),
            "device": _device_name(device),
            "paths": {"result": str(target), "checkpoints": str(run.checkpoints_path)},
            "engine": engine.facts(),
            "skipped_steps": list(totals.skipped_steps),
            "streamed": streamed,
            "effective": {**asdict(spent), "share": spent.share, "other_seconds": spent.other_seconds},
        }
    )


def _device(recipe: Recipe, ranks: Ranks) -> torch.device:
    if recipe.engine.device == "cuda":
        torch.cuda.set_device(ranks.local_rank)
        return torch.device("cuda", ranks.local_rank)
    return torch.device("cpu" if recipe.engine.device == "auto" else recipe.engine.device)


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type} ({torch.get_num_threads()} threads)"


def _resume(run: RunFolder, engine: Engine, now: Mapping[str, Any]) -> int:
    """Load the newest good checkpoint. Returns the number of steps done.

    A launcher that has verified it and compared `now` with it says so in SHARDWISE_RESUME_STEP; without one
    (torchrun, Slurm) rank 0 does both here, before the others begin to read. Changes that are wanted then come
    by name in SHARDWISE_ACCEPT.
    """
    step = os.environ.get("SHARDWISE_RESUME_STEP")
    found: list[Any] = [None]
    if step is not None:
        found = [int(step)]
    elif engine.ranks.rank == 0:
        try:
            checkpoint, skipped = chosen(run)
            changes = compare(facts_of(checkpoint.path), now)
            accepted = accepted_of(os.environ) & {c.field for c in changes}
            check(changes, accepted, checkpoint.step)
            _tell(run, skipped, [(c, c.field in accepted) for c in changes], checkpoint.step)
            found = [checkpoint.step]
        except ShardwiseError as problem:
            found = [problem]
    if step is None and engine.ranks.world_size > 1:
        dist.broadcast_object_list(found, src=0)
    if isinstance(found[0], ShardwiseError):
        raise found[0]
    path = run.checkpoint_path(found[0])
    load(path, engine)
    if engine.ranks.rank == 0:
        run.event("resume", step=found[0], path=str(path))
        print(f"resumed from {path} after step {found[0]}", file=sys.stderr, flush=True)
    return int(found[0])


def _explain_best(run: RunFolder, recipe: Recipe) -> None:
    """Which checkpoints can be the best one: those whose step is evaluated too."""
    save, evaluate = recipe.checkpoint.every_steps, recipe.evaluation.every_steps
    if not (isinstance(save, int) and isinstance(evaluate, int) and save and evaluate):
        return
    if save % evaluate:
        message = (
            f"saved every {save} steps, evaluated every {evaluate}: the best checkpoint is chosen among those of "
            f"every {math.lcm(save, evaluate)} steps and the last, where both meet"
        )
        run.event("warning", message=message)
        print(f"warning: {message}", file=sys.stderr, flush=True)


def _record_code(run: RunFolder, folder: ModelFolder) -> None:
    """Python that came with the model and was allowed to run stands in the run's record, file by file."""
    if not folder.recipe.model.trust_remote_code:
        return
    files = [f"{p.name} (SHA-256 {sha256(p)[:16]})" for p in sorted(folder.path.glob("*.py"))]
    if files:
        message = f"model.trust_remote_code is true: this run executed {', '.join(files)} of {folder.path}"
        run.event("warning", message=message)
        print(f"warning: {message}", file=sys.stderr, flush=True)


def _tell(
    run: RunFolder, skipped: Sequence[Skipped], changes: Sequence[tuple[Change, bool]], step: int
) -> None:
    """Say and record what is not used, and what has changed since `step`; damaged checkpoints are set aside."""
    told = pass_over(skipped, f"from step {step}")
    told += [f"since step {step} {change}{' (accepted)' if wanted else ''}" for change, wanted in changes]
    for message in told:
        run.event("warning", message=message)
        print(f"warning: {message}", file=sys.stderr, flush=True)


def _sample(job: Job, tokenizer: Any, prompts: list[samples.Prompt], step: int, bar: Bar) -> None:
    if not prompts:
        return
    bar.say(f"answering {len(prompts)} held-out prompts ...")
    ends = end_ids(tokenizer, job.recipe.model.chat_template)
    answers = samples.answer(job.engine, tokenizer, prompts, job.recipe.evaluation.max_new_tokens, ends)
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
