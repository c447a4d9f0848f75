"""The formula of an estimate: every term at the peak as a sum of monomials, and what one more of something costs.

The paper step is played once more, on sizes that keep their formula. Padding of shards and rounding are in the
factors, so that the sum is the estimate itself.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from shardwise.estimate.memory.around import Around
from shardwise.estimate.memory.formula import ours, question_of
from shardwise.estimate.memory.held_out import play_evaluation
from shardwise.estimate.memory.layer import Block, Matrix
from shardwise.estimate.memory.moments import moments
from shardwise.estimate.memory.play import Question, play
from shardwise.estimate.memory.states import OUR_BUCKET_ELEMENTS, Held, held
from shardwise.estimate.memory.symbols import Monomial, Size, Sum, evaluate, monomials_of, scaled, symbol
from shardwise.estimate.memory.trainer import Trainer
from shardwise.estimate.stack import Stack
from shardwise.facts.model import ModelShape

WORDS = {
    "b": "sequences per micro-batch",
    "S": "tokens per sequence",
    "L": "layers",
    "H": "hidden size",
    "F": "width of the MLP",
    "N": "query heads",
    "K": "key-value heads",
    "D": "head size",
    "V": "vocabulary",
    "P": "parameters",
    "W": "frozen parameters in 16 bits",
    "Q": "parameters in 4 bits",
    "A": "inputs and outputs of all adapted matrices",
    "r": "rank of the adapters",
    "n": "ranks that share the states",
    "p": "parameters of a layer",
    "a": "inputs and outputs of a layer's adapted matrices",
    "e": "parameters outside the layers",
    "B": "elements of a reduction bucket",
    "G": "elements that ZeRO-3 keeps gathered",
}


@dataclass(frozen=True)
class Formula:
    """`terms`: term -> {monomial: bytes per unit}; `values`: what each symbol stands for here.

    It holds as long as the peak stays at the same moment of the same phase.
    """

    terms: dict[str, Sum]
    values: dict[str, float]
    phase: str

    def bytes_at(self, changes: Mapping[str, float] = {}) -> float:
        """The peak with some symbols at other values."""
        values = {**self.values, **changes}
        return sum(evaluate(monomials, values) for monomials in self.terms.values())

    def bytes_at_monomial(self, monomial: Monomial, factor: float) -> float:
        """What one monomial comes to."""
        return evaluate({monomial: factor}, self.values)

    def change(self, name: str, step: float) -> float:
        """Bytes that `step` more of a symbol add to the peak, 0 where the formula does not hold it."""
        if name not in self.values:
            return 0.0
        return self.bytes_at({name: self.values[name] + step}) - self.bytes_at()

    @property
    def sensitivities(self) -> dict[str, float]:
        """Bytes per further sequence in a micro-batch, 1,000 tokens in each, rank of adapters, rank of the run."""
        return {
            "micro_batch_size": self.change("b", 1),
            "thousand_tokens": self.change("S", 1000),
            "lora_rank": self.change("r", 1),
            "world_size": self.change("n", 1),
        }


def formula_of(shape: ModelShape, stack: Stack, trainer: Trainer | None = None) -> Formula:
    """The formula of `estimate_memory` for the same question."""
    trainer = trainer or ours(stack)
    symbols = _Symbols(shape, stack)
    question = _question(symbols, question_of(shape, stack, trainer), stack)
    states = _states(symbols, held(shape, stack, trainer), stack)
    found = moments(states, question, stack, shape, play, play_evaluation)
    terms = {term: monomials_of(size) for term, size in found.sizes.items() if size}
    used = {name for monomials in terms.values() for monomial in monomials for name, _ in monomial}
    values = {name: value for name, value in symbols.values.items() if name in used}
    return Formula(terms, values, found.peak_phase)


class _Symbols:
    """Makes symbols of one question and remembers their values."""

    def __init__(self, shape: ModelShape, stack: Stack) -> None:
        self.shape, self.stack = shape, stack
        self.values: dict[str, float] = {}
        adapted = () if stack.method == "full" else shape.adapted(stack.lora_targets)
        widths = sum(sum(t.shape[:2]) * t.count for t in adapted)
        in_layers = sum(sum(t.shape[:2]) * t.count for t in adapted if t.per_layer)
        self.rank = self("r", stack.lora_rank)
        self.n = self("n", stack.dp_shard)
        full = stack.method == "full"
        self.trained: Any = self("P", shape.total_parameters) if full else self("A", widths) * self.rank
        layer = self("p", shape.layer_parameters)
        self.layer = layer if full else layer + self("a", in_layers // shape.num_hidden_layers) * self.rank
        self.layer_trained = self.layer if full else self.layer - layer
        self.root = self("e", shape.total_parameters - shape.layer_parameters * shape.num_hidden_layers)

    def __call__(self, name: str, value: float) -> Any:
        self.values[name] = value
        return symbol(name, value)


def _states(s: _Symbols, states: Held, stack: Stack) -> Held:
    """What a rank holds, as multiples of parameters and of what is trained."""
    one: Any = Size(1, {(): 1})
    weight_shards = s.n if stack.sharding in ("fsdp2", "zero3") else one
    state_shards = s.n if stack.sharding not in ("single", "ddp") else one
    gradient_shards = s.n if stack.sharding in ("fsdp2", "zero2", "zero3") else one
    c = 2 if stack.precision == "bf16" else 4
    weights = scaled(states.weights, s.trained / weight_shards)
    if stack.method != "full":
        own = s.trained * (0 if stack.sharding == "fsdp2" and states.masters else c) / weight_shards
        frozen = s.shape.total_parameters - s.shape.quantised_parameters * (stack.method == "qlora")
        base = s("W", frozen) * c / weight_shards
        if stack.method == "qlora":
            base = base + s("Q", s.shape.quantised_parameters) * 0.5 / weight_shards
        weights = own + scaled(states.weights - own.value, base) if states.weights else own * 0
    updated: Any = states.update_elements
    if updated >= 0.99 * s.trained.value / state_shards.value and updated != OUR_BUCKET_ELEMENTS:
        updated = scaled(updated, s.trained / state_shards)
    return replace(
        states,
        weights=weights,
        masters=scaled(states.masters, s.trained / state_shards),
        optimizer=scaled(states.optimizer, s.trained / state_shards),
        gradients=scaled(states.gradients, s.trained / gradient_shards),
        update_elements=updated,
    )


def _question(s: _Symbols, question: Question, stack: Stack) -> Question:
    """The same question with symbols for its numbers."""
    sequence = s("S", stack.sequence_length)
    tokens = s("b", stack.micro_batch_size) * sequence
    labelled: Any = question.labelled
    if stack.labelled_tokens is None or labelled == tokens.value:
        labelled = tokens
    return replace(
        question,
        block=_block(s, question.block),
        layers=s("L", question.layers),
        vocabulary=s("V", question.vocabulary),
        tokens=tokens,
        labelled=labelled,
        sequence=sequence,
        around=_around(s, question.around, stack),
    )


def _block(s: _Symbols, block: Block) -> Block:
    hidden, heads, groups = s("H", block.hidden), s("N", block.heads), s("K", block.kv_heads)
    head, width = s("D", block.head_dim), s("F", s.shape.intermediate_size)
    inside = [heads * head, groups * head, (heads + groups + groups) * head]
    outside: list[Any] = [width, width * 2, hidden]

    def named(size: int, known: list[Any]) -> Any:
        return next((k for k in known if k.value == size), size)

    def matrix(m: Matrix, inputs: list[Any], outputs: list[Any]) -> Matrix:
        rank: Any = s.rank if m.rank else 0
        return replace(m, inputs=named(m.inputs, inputs), outputs=named(m.outputs, outputs), rank=rank)

    return replace(
        block,
        hidden=hidden,
        heads=heads,
        kv_heads=groups,
        head_dim=head,
        attention_in=tuple(matrix(m, [hidden], inside) for m in block.attention_in),
        attention_out=matrix(block.attention_out, inside, [hidden]),
        mlp_in=tuple(matrix(m, [hidden], outside) for m in block.mlp_in),
        mlp_out=None if block.mlp_out is None else matrix(block.mlp_out, outside, [hidden]),
    )


def _around(s: _Symbols, around: Around, stack: Stack) -> Around:
    """Buffers as multiples of a layer's, of the root's, and of trained parameters."""
    like: dict[str, Any] = {
        "gathered": s.layer,
        "reduced": s.layer_trained,
        "shard": s.layer_trained / s.n,
        "root": s.root,
        "root_shard": s.root / s.n,
        "root_reduced": s.root,
        "live": s("G", around.live / (2 if stack.precision == "bf16" else 4)),
    }
    changes: dict[str, Any] = {
        field.name: scaled(value, like[field.name])
        for field in fields(around)
        if field.name in like and (value := getattr(around, field.name))
    }
    if around.buckets is not None:
        b = around.buckets
        elements = s.trained if b.elements == b.trained else s("B", b.elements)
        if stack.sharding == "zero3" and around.constant:  # the bucket in fp32, and this rank's gradients
            sums = elements * 4
            changes["constant"] = sums + scaled(around.constant - sums.value, s.trained / s.n)
        changes["buckets"] = replace(
            b, elements=elements, trained=s.trained, part=scaled(b.part, s.trained / s.n)
        )
    return replace(around, **changes)


def written(monomial: Monomial) -> str:
    """A monomial in symbols, such as "b S L H" or "P / n"."""
    above = [name if power == 1 else f"{name}^{power}" for name, power in monomial if power > 0]
    below = [name if power == -1 else f"{name}^{-power}" for name, power in monomial if power < 0]
    order = list(WORDS)
    above.sort(key=lambda text: order.index(text[0]))
    text = " ".join(above) or "1"
    return f"{text} / {' '.join(below)}" if below else text
