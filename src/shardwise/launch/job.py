"""From a recipe to a finished run: check it, prepare its rows, decide it, start its ranks, write what came out."""

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shardwise.data import Order, Prepared, find_part, make_order, prepare, run_order
from shardwise.data.identity import rows_digest, train_digest
from shardwise.data.streaming import stream_steps
from shardwise.errors import (
    DiskFullError,
    Interrupted,
    OutOfMemoryError,
    RunError,
    ShardwiseError,
    UsageError,
)
from shardwise.facts.download import local_folder
from shardwise.facts.experience import remember
from shardwise.facts.machine import as_offer, detect_machine, pace_key
from shardwise.facts.model import ModelShape, read_model
from shardwise.facts.versions import installed_versions
from shardwise.facts.weights import weights_digest
from shardwise.launch import operators
from shardwise.launch.ahead import Ahead
from shardwise.launch.attempts import attempts, tell
from shardwise.launch.local import Failure
from shardwise.launch.precision import Probe
from shardwise.launch.space import require_space
from shardwise.plan.model import DataFacts, Plan, fill_of
from shardwise.plan.resolve import resolve
from shardwise.recipe import Recipe, dump_recipe
from shardwise.recipe.schema import Source
from shardwise.rules import check, situation
from shardwise.runs import RunFolder, Summary, create_run, tracking
from shardwise.runs.changes import check as check_changes
from shardwise.runs.changes import compare, facts
from shardwise.runs.checkpoints import chosen, pass_over
from shardwise.runs.checkpoints import facts_of as facts_at
from shardwise.runs.jsonfile import write_text

Progress = Callable[[str, int, int | None], None]
COUNTED_STEPS = 1000  # of the first epoch, in which the micro-batch with most labels is looked for


@dataclass(frozen=True)
class Job:
    """A decided run that has not started: nothing has been written but the cache of prepared rows."""

    recipe: Recipe
    plan: Plan
    shape: ModelShape
    prepared: Prepared
    folder: Path


def decide(recipe: Recipe, progress: Progress | None = None) -> Job:
    """Check everything that can be checked before a run folder exists.

    Raises the UsageError family: model, data, rules. Whether the plan fits is for the caller to look at.
    """
    tracking.check(recipe.run.tracking)
    folder = local_folder(recipe.model.source, recipe.model.revision)
    shape = read_model(str(folder))
    check(recipe, shape)
    probe = Probe(recipe)
    try:
        prepared = prepare_rows(recipe, folder, shape, progress)
        probe.collect()
    finally:
        probe.stop()
    offer = as_offer("cpu" if recipe.engine.device == "cpu" else None)
    decided, plan = resolve(recipe, shape, offer, facts_of(prepared, recipe), situation())
    decided = _with_formats(decided)
    if decided.data != recipe.data:
        prepared = prepare_rows(decided, folder, shape, None)
    check(decided, shape)
    return Job(decided, _counted(plan, decided, prepared), shape, prepared, folder)


def _counted(plan: Plan, recipe: Recipe, prepared: Prepared) -> Plan:
    """The plan with steps and fill as the decided rows have them: the very numbers that the ranks will count."""
    facts, stack = facts_of(prepared, recipe), plan.stack
    assert facts.steps_at is not None
    steps = facts.steps_at(stack.sequence_length, stack.global_batch_size)
    return replace(plan, steps=steps, fill=fill_of(facts, stack.sequence_length))


def _with_formats(recipe: Recipe) -> Recipe:
    """Every source with the format it was recognised as."""

    def named(sources: tuple[Source, ...]) -> tuple[Source, ...]:
        fetch = not recipe.data.streaming
        return tuple(
            s.model_copy(update={"format": find_part(s.path, s.format, fetch).format}) for s in sources
        )

    data = recipe.data
    update: dict[str, Any] = {"train": named(data.train)}
    if isinstance(data.validation, tuple):
        update["validation"] = named(data.validation)
    return recipe.model_copy(update={"data": data.model_copy(update=update)})


def prepare_rows(recipe: Recipe, folder: Path, shape: ModelShape, progress: Progress | None) -> Prepared:
    """The recipe's rows as token ids and labels, from the cache where they are there already."""
    return prepare(
        recipe.data,
        folder,
        revision=recipe.model.revision,
        chat_template=recipe.model.chat_template,
        max_length=shape.max_position_embeddings,
        vocabulary=shape.vocab_size,
        seed=recipe.training.seed,
        progress=progress,
    )


def facts_of(prepared: Prepared, recipe: Recipe) -> DataFacts:
    """What the planner needs to know about prepared rows; sequences are counted by packing them."""

    if prepared.stream is not None:
        name = ", ".join(s.path for s in recipe.data.train)
        return DataFacts(name=name, steps_at=lambda length, size: stream_steps(recipe, length, size))

    def order(length: int, global_batch_size: int) -> Order:
        return make_order(
            prepared.train,
            sequence_length=length,
            packing=recipe.data.packing,
            global_batch_size=global_batch_size,
            epochs=1.0,
            seed=recipe.training.seed,
        )

    def labelled_at(length: int, global_batch_size: int, micro_batch_size: int, ranks: int) -> int:
        trained, found = prepared.train.trained, order(length, global_batch_size)
        return max(
            int(trained[[i for one in micro for i in one]].sum())
            for step in range(min(found.steps, COUNTED_STEPS))
            for rank in range(ranks)
            for micro in found.micro_batches(step, rank, ranks, micro_batch_size)
        )

    def steps_at(length: int, global_batch_size: int) -> int:
        return run_order(prepared.train, recipe, length, global_batch_size).steps

    lengths = prepared.train.lengths
    return DataFacts(
        tokens=int(lengths.sum()),
        rows=len(prepared.train),
        # pieces of continuous text are short where documents are; what holds them is the sequence
        longest_tokens=prepared.sequence_length if prepared.report.documents else int(lengths.max()),
        sequences_at=lambda length: order(length, 1).steps,
        labelled_at=labelled_at,
        steps_at=steps_at,
        held_out=prepared.held_out,
        labelled_share=float(prepared.train.trained.sum() / lengths.sum()),
        document_tokens=float((lengths.astype(float) ** 2).sum() / lengths.sum()),
        name=", ".join(s.path for s in recipe.data.train),
    )


def execute(
    job: Job,
    plan_json: Mapping[str, Any],
    run: RunFolder | None = None,
    accepted: Sequence[str] = (),
    ahead: Ahead | None = None,
) -> RunFolder:
    """Start the ranks of a job and wait; with `run`, continue it from its newest good checkpoint.

    A rank that waits `ahead` for this job is told to begin.

    `accepted` names changes since that checkpoint that are wanted. Ranks that were killed or hung are started
    again from the newest good checkpoint, `checkpoint.restarts` times in a row.

    The run folder holds the resolved recipe, the plan, events, checkpoints, the result and a summary. Raises
    RunError when a rank failed, Interrupted (exit 75) when the run stopped on request with its state saved.
    """
    environment = operators.ready(job.recipe, lambda text: print(text, file=sys.stderr, flush=True))
    step: int | None = None
    if run is None:
        require_space(job, Path(job.recipe.run.folder))
        kind = f"{Path(job.recipe.model.source).name.lower()}-{job.recipe.method}"
        text = dump_recipe(
            _with_source(job), comment="the resolved recipe of this run: every default written out"
        )
        run = create_run(Path(job.recipe.run.folder), job.recipe.run.name, text, plan_json, default_name=kind)
    else:
        run.acquire()
        step = _go_on_from(run, job, accepted)
    try:
        outcome = attempts(run, job.recipe, environment, step, ahead)
        return _finish(run, job, outcome.exit_code, outcome.failure)
    except BaseException as problem:
        if run.path.exists() and run.read_status().state == "running":
            code = problem.exit_code if isinstance(problem, ShardwiseError) else 1
            run.status(
                "failed", str(problem).splitlines()[0] if str(problem) else type(problem).__name__, code
            )
        raise
    finally:
        with suppress(OSError):
            run.release()


def _with_source(job: Job) -> Recipe:
    """The recipe with the model's folder as this machine knows it."""
    model = job.recipe.model.model_copy(update={"source": str(job.folder.resolve())})
    return job.recipe.model_copy(update={"model": model})


def _go_on_from(run: RunFolder, job: Job, accepted: Sequence[str]) -> int:
    """Verify the newest checkpoint, compare what made it with what is there now, and take the run up again.

    Returns its step. Raises CheckpointError when none is good, UsageError for changes that are not accepted;
    the run is as it was then.
    """
    try:
        checkpoint, skipped = chosen(run)
        recipe = _with_source(job)
        now = facts(
            recipe.model_dump(mode="json"),
            train_digest(job.prepared),
            rows_digest(job.prepared.validation),
            weights_digest(job.folder),
            installed_versions(),
        )
        changes = compare(facts_at(checkpoint.path), now)
        check_changes(changes, accepted, checkpoint.step)
    except BaseException:
        run.release()
        raise
    for words in pass_over(skipped, f"from step {checkpoint.step}"):
        tell(run, words)
    for change in changes:
        tell(
            run,
            f"since step {checkpoint.step} {change}" + (" (accepted)" if change.field in accepted else ""),
        )
    if changes:
        comment = f"the resolved recipe of this run, as it went on from step {checkpoint.step}"
        write_text(run.recipe_path, dump_recipe(recipe, comment=comment))
    run.status("running")
    return checkpoint.step


def _finish(run: RunFolder, job: Job, exit_code: int, failure: Failure | None) -> RunFolder:
    if exit_code == 0:
        add_estimate(run, job.plan)
        run.status("done", "", 0)
        run.event("end", state="done")
        return run
    if exit_code == Interrupted.exit_code and not run.checkpoints():
        run.status("interrupted", "stopped on request before its first step", exit_code)
        run.event("end", state="interrupted", reason="stopped on request before its first step")
        raise Interrupted(
            f"run {run.name} was stopped before its first step; there was nothing to save",
            "a stop was asked for (Ctrl-C or SIGTERM)",
            "start the recipe again",
        )
    if exit_code == Interrupted.exit_code:
        run.status("interrupted", "stopped on request, state saved", exit_code)
        run.event("end", state="interrupted", reason="stopped on request")
        raise Interrupted(
            f"run {run.name} was stopped; its state is saved in {run.checkpoints_path}",
            "a stop was asked for (Ctrl-C or SIGTERM)",
            f"continue with: shardwise train --resume {run.path}",
        )
    reason = failure.reason if failure else f"exit code {exit_code}"
    if exit_code == UsageError.exit_code and not run.checkpoints():
        tail = "\n".join(failure.tail) if failure else ""
        run.discard()
        raise _Refused(tail or reason)
    with suppress(OSError):  # a full disk; a run without an end is read as failed
        run.status("failed", reason, exit_code)
        run.event("end", state="failed", reason=reason)
    kept = run.checkpoints()
    hint = f"continue with: shardwise train --resume {run.path}" if kept else f"read {run.logs_path}"
    kind: type[RunError] = OutOfMemoryError if failure and failure.out_of_memory else RunError
    if exit_code == DiskFullError.exit_code:
        kind = DiskFullError
    raise kind(
        f"run {run.name} failed: {reason}", f"the log is {failure.log if failure else run.logs_path}", hint
    )


class _Refused(UsageError):
    """A rank refused the recipe before the first step and has printed why."""

    def __str__(self) -> str:
        return "error: the run was refused before it started; nothing was left behind"


def add_estimate(run: RunFolder, plan: Plan) -> None:
    """Put the plan's numbers beside the measured ones."""
    summary = run.summary()
    if summary is None:
        return
    estimate = {
        "peak_allocated_bytes": plan.memory.allocated_bytes,
        "low_bytes": plan.memory.low_bytes,
        "high_bytes": plan.memory.high_bytes,
        "terms": [
            {"name": t.name, "bytes": t.bytes, "formula": t.formula} for t in plan.memory.terms
        ],
        "seconds": plan.seconds,
        "tokens_per_second_per_gpu": plan.speed.tokens_per_second_per_gpu,
    }  # fmt: skip
    run.write_summary({**summary.model_dump(), "estimate": estimate})
    _learn(summary, plan)


def _learn(summary: Summary, plan: Plan) -> None:
    """Keep how long the run took against its estimate, for later plans on this machine."""
    measured, gpu = summary.measured.training_seconds, plan.offer.gpu
    if measured is None or plan.seconds is None or summary.steps is None or summary.steps != plan.steps:
        return  # resumed in between, or ended early: not the run that was planned
    threads = detect_machine().threads
    with suppress(OSError):  # a cache that cannot be written loses a measurement, not a run
        remember(
            pace_key(gpu, threads), plan.stack.world_size, gpu.source, plan.shape.source, plan.stack.method,
            summary.steps, plan.seconds / gpu.pace, measured,
        )  # fmt: skip
