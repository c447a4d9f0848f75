"""The records of a run: one class per kind of event, the status and the summary. JSON names as written here.

Numbers that a run could not measure are None, never 0. Fields unknown to this version are kept, so that an
older reader shows a newer run. Floats take "NaN" and "Infinity" (see jsonfile.py).
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

State = Literal["running", "done", "failed", "interrupted", "refused"]


class Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="allow")


class Event(Record):
    """`time` is Unix time in seconds."""

    kind: str
    time: float = 0.0


class Start(Event):
    kind: Literal["start"] = "start"
    steps: int | None = None  # optimizer steps of the whole run
    world_size: int | None = None
    device: str | None = None
    tokens: int | None = None  # of the whole run, as the model sees them
    trained_tokens: int | None = None
    engine: Mapping[str, Any] | None = (
        None  # what is live: class, stage, dtypes, mesh; compared with the recipe
    )
    kernels: Mapping[str, Any] | None = (
        None  # counts: modules with a kernel by class; skipped: class -> why not
    )


class Step(Event):
    """One optimizer step, all ranks together. `loss` is the mean over the step's trained tokens.

    `tokens` and `trained_tokens` count this step; `seconds` is its wall time; `allocated_bytes` what lives
    after it, `peak_allocated_bytes` the run's peak so far (on a processor no more than what lives, until a step has
    been followed), both of the fullest rank.
    """

    kind: Literal["step"] = "step"
    step: int
    loss: float
    learning_rate: float | None = None
    grad_norm: float | None = None  # before clipping
    tokens: int | None = None
    trained_tokens: int | None = None
    seconds: float | None = None
    cpu_seconds: float | None = None  # processor seconds of rank 0, all its threads
    tokens_per_second: float | None = None
    allocated_bytes: int | None = None
    peak_allocated_bytes: int | None = None
    resident_bytes: int | None = None
    epoch: float | None = None


class Evaluation(Event):
    """Held-out loss, mean over trained tokens; perplexity = exp(loss)."""

    kind: Literal["evaluation"] = "evaluation"
    step: int
    loss: float
    perplexity: float | None = None
    trained_tokens: int | None = None


class Sample(Event):
    """What the model answered to a held-out prompt after `step` steps."""

    kind: Literal["sample"] = "sample"
    step: int
    prompt: str
    answer: str
    reference: str | None = None


class Checkpoint(Event):
    """`seconds`: how long training waited for it; `written_seconds`: until it was whole on the disk."""

    kind: Literal["checkpoint"] = "checkpoint"
    step: int
    path: str | None = None
    bytes: int | None = None
    seconds: float | None = None
    written_seconds: float | None = None


class Warned(Event):
    kind: Literal["warning"] = "warning"
    message: str
    step: int | None = None


class Fault(Event):
    """A rank died or hung, and the run goes on by itself. `time`: when its launcher noticed.

    `silent_seconds`: from the rank's last sign of life to then.
    """

    kind: Literal["fault"] = "fault"
    rank: int
    reason: str
    silent_seconds: float | None = None


class Resume(Event):
    """The run went on from the checkpoint of `step`; later events of before are not part of it any more."""

    kind: Literal["resume"] = "resume"
    step: int
    path: str | None = None


class End(Event):
    kind: Literal["end"] = "end"
    state: State
    reason: str | None = None
    step: int | None = None


EVENTS: dict[str, type[Event]] = {
    "start": Start,
    "step": Step,
    "evaluation": Evaluation,
    "sample": Sample,
    "checkpoint": Checkpoint,
    "warning": Warned,
    "fault": Fault,
    "resume": Resume,
    "end": End,
}


class Status(Record):
    state: State
    reason: str = ""
    exit_code: int | None = None
    time: float = 0.0


class Seconds(Record):
    total: float | None = None
    training: float | None = None


class Term(Record):
    """Bytes of one memory term at the peak; names as in estimate/memory/terms.py."""

    name: str
    bytes: int
    formula: str = ""


def _terms(value: Any) -> Any:
    """{name: bytes} stands for a list of terms."""
    return [{"name": n, "bytes": b} for n, b in value.items()] if isinstance(value, Mapping) else value


Terms = Annotated[tuple[Term, ...], BeforeValidator(_terms)]


class Estimated(Record):
    """What the plan said before the run."""

    peak_allocated_bytes: int | None = None
    terms: Terms = ()
    seconds: float | None = None  # of training
    tokens_per_second_per_gpu: float | None = None
    low_bytes: int | None = None
    high_bytes: int | None = None


class Measured(Record):
    """What happened. `peak_allocated_bytes`: live tensors; `peak_resident_bytes`: the system's count."""

    peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    peak_phase: str | None = None
    terms: Terms = ()
    peak_resident_bytes: int | None = None
    training_seconds: float | None = None
    tokens_per_second_per_gpu: float | None = None
    mfu: float | None = None


class SamplePair(Record):
    """One held-out prompt and its answers before and after training."""

    prompt: str
    reference: str | None = None
    before: str | None = None
    after: str | None = None


class Summary(Record):
    """`summary.json`. `versions` maps package to version, `paths` what to where."""

    state: State
    steps: int | None = None
    seconds: Seconds = Seconds()
    tokens: int | None = None
    trained_tokens: int | None = None
    loss_first: float | None = None
    loss_last: float | None = None
    evaluation_before: float | None = None
    evaluation_after: float | None = None
    estimate: Estimated = Estimated()
    measured: Measured = Measured()
    samples: tuple[SamplePair, ...] = ()
    versions: dict[str, str] = Field(default_factory=dict)
    device: str | dict[str, Any] | None = None
    paths: dict[str, str] = Field(default_factory=dict)
