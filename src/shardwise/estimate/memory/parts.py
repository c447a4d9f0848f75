"""Which modules the bytes at the peak belong to: the paper step with every layer played and every place kept."""

from collections import Counter
from dataclasses import dataclass, replace

from shardwise.estimate.memory.formula import ours, question_of
from shardwise.estimate.memory.held_out import play_evaluation
from shardwise.estimate.memory.moments import moments
from shardwise.estimate.memory.paper import Paper, Sheet
from shardwise.estimate.memory.play import Question, play
from shardwise.estimate.memory.states import held
from shardwise.estimate.memory.terms import TERMS
from shardwise.estimate.memory.trainer import Trainer
from shardwise.estimate.stack import Stack
from shardwise.facts.model import ModelShape


@dataclass(frozen=True, slots=True)
class Part:
    """Bytes at the peak of one term that one module made. `module`: its name with * for the layer; "" for none.

    `kind`: what was played: a matrix's own name, norm, attention, experts, loss, or "".
    """

    bytes: int
    term: str
    module: str
    kind: str


class PlacedSheet(Sheet):
    """A sheet that knows the place of every tensor; of bytes without a tensor only the term."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: Counter[tuple[str, str]] = Counter()
        self.parts_at_peak: dict[str, dict[tuple[str, str], int]] = {}
        self.place_of: dict[int, str] = {}

    def add(self, size: int, term: str) -> None:
        self._count(size, term, "")
        super().add(size, term)

    def remove(self, size: int, term: str) -> None:
        self.parts[term, ""] -= size
        super().remove(size, term)

    def new(self, size: int, term: str | None = None, needs_grad: bool = False) -> Paper:
        self._count(size, term or self.term, self.place)
        tensor = super().new(size, term, needs_grad)
        self.place_of[id(tensor)] = self.place
        return tensor

    def drop(self, *tensors: Paper) -> None:
        for tensor in tensors:
            if tensor.refs == 1:
                self.parts[tensor.term, self.place_of.pop(id(tensor), "")] -= tensor.bytes
            super().drop(tensor)

    def _count(self, size: int, term: str, place: str) -> None:
        self.parts[term, place] += size
        if self.live + size > self.top:
            self.parts_at_peak[self.phase] = dict(self.parts)


def parts_of(shape: ModelShape, stack: Stack, trainer: Trainer | None = None) -> list[Part]:
    """What is alive at the peak of `estimate_memory`, by term and module, largest first."""
    trainer = trainer or ours(stack)
    sheet = PlacedSheet()

    def placed(question: Question) -> Sheet:
        return play(replace(question, every_layer=True), sheet)

    def held_out(question: Question) -> Sheet:
        return play_evaluation(replace(question, every_layer=True))

    states = held(shape, stack, trainer)
    found = moments(states, question_of(shape, stack, trainer), stack, shape, placed, held_out)
    at_peak = sheet.parts_at_peak.get(found.peak_phase, {})
    modules = {t.module: t.name.removesuffix(".weight") for t in shape.tensors if t.part == "text"}
    parts: Counter[tuple[str, str, str]] = Counter()
    for (term, place), size in at_peak.items():
        parts[(term, _module(place, modules), _kind(place))] += size
    for term in TERMS:  # what is held between steps, and what has no tensor
        rest = found.sizes[term] - sum(size for (t, _, _), size in parts.items() if t == term)
        parts[(term, "", "")] += rest
    return sorted((Part(b, *key) for key, b in parts.items() if b), key=lambda part: -part.bytes)


_WORDS = {
    "norm": "the last norm",
    "q_norm": "norms of queries",
    "k_norm": "norms of keys",
    "attention": "attention of the layers",
    "rotary": "rotary embeddings of the layers",
    "residual": "sums between the layers",
    "loss": "output matrix and loss",
    "experts": "experts of the layers",
}


def _kind(place: str) -> str:
    return "norm" if "norm" in place else place


def _module(place: str, modules: dict[str, str]) -> str:
    """A place of the paper step as the model calls it."""
    if place in modules:
        return modules[place]
    if place.startswith("norm") and place != "norm":
        return "norms of the layers"
    return _WORDS.get(place, place)
