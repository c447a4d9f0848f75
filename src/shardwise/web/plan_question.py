"""The controls of the Plan page: query string -> question -> the same question as a shell command."""

import gc
import shlex
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import lru_cache

from shardwise.errors import UsageError, unknown_name
from shardwise.facts.catalogue import known_models, named_shape
from shardwise.facts.gpus import Offer, catalogue, find_gpu, load_prices, parse_offer
from shardwise.facts.hub import read_hub_model
from shardwise.facts.model import ModelShape, read_model
from shardwise.launch.counting import count_rows
from shardwise.plan.model import DataFacts
from shardwise.plan.question import COUNTS, METHODS, Answer, Question, checkpointing_of
from shardwise.plan.search import answer
from shardwise.units import parse_count, parse_seconds, parse_usd

ANY = "any"


@dataclass(frozen=True)
class Controls:
    """Every control by the name it has in the address; text as a person sets it. Empty: not asked for."""

    model: str = "meta-llama/Llama-3.1-8B"
    method: str = ANY
    gpu: str = "H100-80GB"
    count: str = "8"
    tokens: str = "10M"
    data: str = ""
    epochs: str = "1"
    sequence_length: str = "2048"
    micro_batch_size: str = ""
    activation_checkpointing: str = ""
    rank: str = "16"
    budget: str = ""
    deadline: str = ""

    @property
    def offer_name(self) -> str | None:
        return None if self.gpu == ANY else f"{self.count}x{self.gpu}"

    def changed(self, **values: str) -> dict[str, str]:
        """The controls after a change, without those at their defaults: the query of a link."""
        new = {f.name: values.get(f.name, getattr(self, f.name)) for f in fields(self)}
        return {f.name: new[f.name] for f in fields(self) if new[f.name] != f.default}


def read_controls(query: Mapping[str, str]) -> Controls:
    """Unknown keys are refused: a link with a misspelt one would ask something else in silence."""
    known = {f.name for f in fields(Controls)}
    for key in query:
        if key not in known:
            raise unknown_name("control", key, known)
    given = {key: value.strip()[:300] for key, value in query.items()}
    if given.get("gpu", ANY) != ANY:
        with suppress(UsageError):  # an unknown one is told where the answer stands
            given["gpu"] = find_gpu(given["gpu"]).name
    return Controls(**given)


@dataclass(frozen=True)
class Sources:
    """Models and data files that may be read from disk, beside the catalogue of models."""

    models: tuple[str, ...] = ()
    data: tuple[str, ...] = ()


def ask(controls: Controls, sources: Sources) -> Answer:
    """Plan what the controls say. Raises the UsageError family."""
    return _ask(controls, _permitted(controls, sources), (controls.offer_name,))


def ask_all_counts(controls: Controls, sources: Sources) -> Answer:
    """The best engines over every count of the chosen GPU (or, for any GPU, over the catalogue)."""
    if controls.gpu == ANY:
        return ask(controls, sources)
    gpu = find_gpu(controls.gpu)
    counts = [n for n in COUNTS if n <= 64 and (n <= gpu.gpus_per_node or _fills_nodes(gpu, n))]
    names = dict.fromkeys([*(f"{n}x{gpu.name}" for n in counts), controls.offer_name])
    return _ask(controls, _permitted(controls, sources), tuple(names), True)


def _fills_nodes(gpu: object, count: int) -> bool:
    per_node: int = gpu.gpus_per_node  # type: ignore[attr-defined]
    return count % per_node == 0 and gpu.form != "desktop"  # type: ignore[attr-defined]


def _permitted(controls: Controls, sources: Sources) -> bool:
    """Whether the model is one of those on disk. Raises for a model or a file that is not to be read."""
    if controls.data and controls.data not in sources.data:
        raise unknown_name(
            "data file", controls.data, sources.data, "start the page with --data FILE to let it read one"
        )
    return controls.model in sources.models


@lru_cache(maxsize=512)
def _ask(
    controls: Controls, on_disk: bool, offers: tuple[str | None, ...], best_only: bool = False
) -> Answer:
    asked = question(controls, on_disk, tuple(parse_offer(o) for o in offers if o is not None))
    gc.disable()  # a search makes many objects and no cycles
    try:
        found = answer(replace(asked, best_only=best_only))
    finally:
        gc.enable()
    # Remembered answers hold some 100,000 objects, and a full collection over them stalls the page for 100 ms.
    # They stay for long and have no cycles, so the collector need not look at them again.
    gc.collect(1)
    gc.freeze()
    return found


def question(controls: Controls, on_disk: bool, offers: tuple[Offer, ...]) -> Question:
    """Controls as the planner wants them. Raises the UsageError family."""
    c = controls
    shape = shape_of(c.model, on_disk)
    length = _whole("sequence_length", c.sequence_length)
    return Question(
        shape=shape,
        prices=load_prices(),
        data=_data(c, shape, length),
        epochs=_positive("epochs", c.epochs),
        methods=METHODS if c.method == ANY else (_one_of("method", c.method, METHODS),),
        offers=offers,
        sequence_length=length,
        budget_usd=parse_usd(c.budget) if c.budget else None,
        deadline_seconds=parse_seconds(c.deadline) if c.deadline else None,
        lora_rank=_whole("rank", c.rank),
        micro_batch_size=_whole("micro_batch_size", c.micro_batch_size) if c.micro_batch_size else None,
        activation_checkpointing=checkpointing_of(c.activation_checkpointing, shape),
    )


@lru_cache(maxsize=64)
def shape_of(model: str, on_disk: bool) -> ModelShape:
    """A folder the page was allowed to read, the catalogue's record, or what the hub says of another id.

    One object per model: estimates of one shape are remembered by identity. Raises the UsageError family.
    """
    if on_disk:
        return read_model(model)
    found = named_shape(model)
    if found is not None:
        return found
    if model.count("/") != 1 or model.startswith((".", "/", "~")):
        close = unknown_name("model", model, known_models())
        raise UsageError(
            close.what, "it is no hub id and not in the catalogue",
            f"{close.hint}; a folder of yours: shardwise web --model FOLDER",
        )  # fmt: skip
    return read_hub_model(model)  # ids only: never a path


def _data(c: Controls, shape: ModelShape, length: int) -> DataFacts:
    if c.data:  # counted as the command counts
        return count_rows(c.model, None, shape, c.data, length, _positive("epochs", c.epochs))[0]
    if not c.tokens:
        return DataFacts()
    tokens = parse_count(c.tokens)
    if tokens < 1:
        raise UsageError(f"{c.tokens} tokens", "there must be at least one", "write it like 10M")
    return DataFacts(tokens=tokens)


def _whole(name: str, text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < 1 or len(text) > 9:
        raise UsageError(f"{name} = '{text}'", "it must be a whole number above 0", "write it like 8")
    return int(text)


def _positive(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e6:
        raise UsageError(f"{name} = '{text}'", "it must be a number above 0", "write it like 3")
    return value


def _one_of(name: str, text: str, known: tuple[str, ...]) -> str:
    if text not in known:
        raise unknown_name(name, text, known)
    return text


def command_of(controls: Controls) -> str:
    """The shell command that asks the same."""
    c = controls
    words = ["shardwise", "plan", c.model]
    flags = (
        ("--method", "" if c.method == ANY else c.method),
        ("--gpus", c.offer_name or ANY),
        ("--data", c.data),
        ("--tokens", "" if c.data else c.tokens),
        ("--epochs", "" if c.epochs == "1" else c.epochs),
        ("--sequence-length", c.sequence_length),
        ("--micro-batch-size", c.micro_batch_size),
        ("--activation-checkpointing", c.activation_checkpointing),
        ("--rank", "" if c.rank == "16" else c.rank),
        ("--budget", c.budget),
        ("--deadline", c.deadline),
    )
    for flag, value in flags:
        if value:
            words += [flag, value]
    return " ".join(shlex.quote(w) for w in words)


def flag_as_change(change: str) -> dict[str, str]:
    """A change the planner proposes ('--method qlora', '--gpus 32xH100-80GB') -> controls; {} if none fits."""
    flag, _, value = change.partition(" ")
    if flag == "--gpus":
        count, _, gpu = value.partition("x")
        return {"count": count, "gpu": gpu} if gpu in catalogue() else {}
    name = flag.removeprefix("--").replace("-", "_")
    return {name: value} if name in {f.name for f in fields(Controls)} else {}
