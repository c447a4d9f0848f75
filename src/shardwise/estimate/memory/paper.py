"""Autograd's bookkeeping on paper: which tensors are alive when, with sizes only.

A `Sheet` plays one training step in plain Python: operations allocate their outputs, keep what their backward
needs, and the backward pass frees it again in reverse order, as torch.autograd does (reference counts; gradients
of shared inputs added in place when nobody else holds them). What it ignores: the contents, the time, and
scratch memory inside one kernel unless the operation states it.

It exists because a peak is a moment, not a sum: which tensors overlap is decided by this order.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

from shardwise.estimate.memory.terms import TERMS


class Paper:
    """A tensor without contents. `grad` is the gradient being collected in the backward pass.

    `view`: it shares its storage with a tensor that autograd remembers, so that nothing is added to it in place.
    """

    __slots__ = ("bytes", "grad", "needs_grad", "refs", "term", "view")

    def __init__(self, size: int, term: str, needs_grad: bool) -> None:
        self.bytes, self.term, self.needs_grad = size, term, needs_grad
        self.view = False
        self.refs = 1
        self.grad: Paper | None = None


class Node:
    """One step of the backward pass.

    `inputs`: (tensor, True when its gradient is the output's gradient itself, as in an addition).
    `weights`: names and bytes of parameter gradients. `scratch`: bytes alive only while the node runs.
    `early`: bytes that are allocated and freed before the gradients of the inputs are made.
    `views`: the gradients it makes are views (a function of Python that reshapes them at its end).
    """

    __slots__ = ("early", "inputs", "output", "place", "saved", "scratch", "views", "weights")

    def __init__(
        self,
        output: Paper,
        inputs: Sequence[tuple[Paper, bool]],
        saved: Sequence[Paper],
        weights: Sequence[tuple[str, int]],
        scratch: int,
        early: int,
        views: bool,
        place: str,
    ) -> None:
        self.output, self.inputs, self.saved, self.views, self.place = output, inputs, saved, views, place
        self.weights, self.scratch, self.early = weights, scratch, early


class Sheet:
    """What is alive now, per term, and the highest moment of each phase."""

    def __init__(self) -> None:
        self.live = 0
        self.terms = dict.fromkeys(TERMS, 0)
        self.phase = "forward"
        self.top = -1  # the highest moment of this phase
        self._tops: dict[str, int] = {}  # and of those before
        self._at_peak: dict[str, dict[str, int]] = {}
        self._rising = False  # at the highest moment of the phase: its terms are noted when something goes
        self.nodes: list[Node] = []
        self.grad_enabled = True
        self.gradients: dict[str, int] = {}  # parameter name -> bytes of its .grad
        self.drop_weight_gradients = False  # a hook takes each gradient away as soon as it is complete
        self.take: Callable[[Sheet, int], None] | None = None  # takes over every gradient of a parameter
        self.ready: list[int] = []  # bytes of gradients that are complete
        self.term = "activations"
        self.place = (
            ""  # part of the model whose operations are played; for whoever asks where bytes come from
        )

    # Plain storage

    def add(self, size: int, term: str) -> None:
        """Bytes that come to life, without a tensor to hold them."""
        live = self.live + size
        if live > self.top:
            self.top = live
            self._rising = True
        elif self._rising and size < 0:
            self._note()
        self.live = live
        self.terms[term] += size

    def remove(self, size: int, term: str) -> None:
        if self._rising:
            self._note()
        self.live -= size
        self.terms[term] -= size

    def _note(self) -> None:
        self._at_peak[self.phase] = dict(self.terms)
        self._rising = False

    @property
    def peaks(self) -> dict[str, int]:
        """Phase -> most bytes that were alive."""
        return {**self._tops, self.phase: self.top} if self.top >= 0 else self._tops

    @property
    def at_peak(self) -> dict[str, dict[str, int]]:
        """Phase -> what was alive at its highest moment, by term."""
        if self._rising:
            self._note()
        return self._at_peak

    def stood(self, height: int, terms: Mapping[str, int]) -> None:
        """A moment above all others of this phase, which has not been played, had `height` bytes in `terms`."""
        self.top, self._rising = height, False
        self._at_peak[self.phase] = dict(terms)

    def flash(self, size: int, term: str = "temporaries") -> None:
        """Bytes that live for a moment."""
        if size:
            self.add(size, term)
            self.remove(size, term)

    def enter(self, phase: str) -> None:
        if self._rising:
            self._note()
        self._tops = self.peaks
        self.phase, self.top = phase, self._tops.get(phase, -1)
        self.add(0, "temporaries")

    # Tensors. A picture of all stacks makes and drops a hundred thousand: `add` and `remove` are written out.

    def new(self, size: int, term: str | None = None, needs_grad: bool = False) -> Paper:
        term = term or self.term
        live = self.live = self.live + size
        if live > self.top:
            self.top = live
            self._rising = True
        self.terms[term] += size
        return Paper(size, term, needs_grad)

    def drop(self, *tensors: Paper) -> None:
        """A variable goes out of scope."""
        for tensor in tensors:
            tensor.refs -= 1
            if not tensor.refs:
                if self._rising:
                    self._note()
                self.live -= tensor.bytes
                self.terms[tensor.term] -= tensor.bytes

    def op(
        self,
        size: int,
        inputs: Iterable[Paper],
        saved: Iterable[Paper] = (),
        *,
        save_output: bool = False,
        weights: Sequence[tuple[str, int]] = (),
        alias: bool = False,
        scratch: int = 0,
        backward_scratch: int = 0,
        backward_early: int = 0,
        views: bool = False,
        written_over: Paper | None = None,
    ) -> Paper:
        """An operation: allocate `size` bytes, remember what its backward needs, return the output.

        `weights` are trained parameters of the operation. `alias`: gradients pass through unchanged.
        `scratch` lives during the forward of this operation only. `written_over`: an input of 0 bytes whose place the
        output takes, and which gets the output's gradient.
        """
        inputs = [t for t in inputs if t.needs_grad]
        needs = self.grad_enabled and bool(inputs or weights)
        output = self.new(size, None, needs)
        if scratch:
            self.flash(scratch)
        if needs:
            kept = [*saved, output] if save_output else list(saved)
            for tensor in kept:
                tensor.refs += 1
            self.nodes.append(
                Node(
                    output, [(t, alias or t is written_over) for t in inputs], kept, weights, backward_scratch,
                    backward_early, views, self.place,
                )
            )  # fmt: skip
        return output

    # Backward

    def backward(self, root: Paper, start: int = 0) -> None:
        """Play the nodes after number `start`, last first. `root.grad` is the gradient that comes from above."""
        nodes, self.nodes = self.nodes[start:], self.nodes[:start]
        for node in reversed(nodes):
            grad, node.output.grad = node.output.grad, None
            self.place = node.place
            made = self._run(node, grad) if grad is not None else []
            self.drop(*node.saved)
            for tensor, new in made:
                if tensor.grad is None:
                    tensor.grad = new
                else:
                    self._collect(tensor, tensor.grad, new)
            if self.ready:
                self.hand_over()

    def _run(self, node: Node, grad: Paper) -> list[tuple[Paper, Paper]]:
        if node.early:
            self.flash(node.early)
        if node.scratch:
            self.add(node.scratch, "temporaries")
        made: list[tuple[Paper, Paper]] = []
        for tensor, alias in node.inputs:
            if alias and tensor.bytes in (grad.bytes, 0):
                grad.refs += 1
                made.append((tensor, grad))
            else:
                made.append((tensor, self.new(tensor.bytes, "temporaries")))
                made[-1][1].view = node.views
        for name, size in node.weights:
            self.weight_gradient(name, size)
        if node.scratch:
            self.remove(node.scratch, "temporaries")
        self.drop(grad)
        return made

    def _collect(self, tensor: Paper, old: Paper, new: Paper) -> None:
        if old.refs == 1 and not old.view:
            self.drop(new)
        else:
            tensor.grad = self.new(tensor.bytes, "temporaries")
            self.drop(old, new)

    def hand_over(self) -> None:
        """Complete gradients go to whoever takes them, after the operation that made them let go of its tensors."""
        if self.take is not None and self.ready:
            ready, self.ready = self.ready, []
            for size in ready:
                self.take(self, size)

    def weight_gradient(self, name: str, size: int) -> None:
        """A parameter's gradient has been formed: it becomes its .grad, or is added to the one it has."""
        if self.take is not None:
            self.add(size, "temporaries")
            self.ready.append(size)
        elif name in self.gradients or self.drop_weight_gradients:
            self.flash(size)  # added to the one that is there
        else:
            self.gradients[name] = size
            self.add(size, "gradients")
