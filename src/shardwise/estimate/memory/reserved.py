"""What the caching allocator holds: the paper step's allocations, replayed for two steps."""

from dataclasses import replace

from shardwise.estimate.memory.allocator import CachingAllocator
from shardwise.estimate.memory.paper import Paper, Sheet
from shardwise.estimate.memory.play import Question, play
from shardwise.estimate.memory.states import Held
from shardwise.facts.model import ModelShape


class ReplaySheet(Sheet):
    """A sheet whose every allocation also happens in an allocator."""

    def __init__(self, allocator: CachingAllocator, aside: CachingAllocator, first_handle: int) -> None:
        super().__init__()
        self.allocator, self.aside, self.handle = allocator, aside, first_handle
        self._of: dict[int, int] = {}  # id of a tensor on paper -> handle
        self._loose: dict[str, list[tuple[int, int]]] = {}  # term -> [(handle, bytes)] without a tensor
        self._inside = False

    def _take(self, size: int, term: str) -> int:
        self.handle += 1
        self._pool(term).allocate(self.handle, size)
        return self.handle

    def _pool(self, term: str) -> CachingAllocator:
        """Engines gather and reduce on streams of their own, and the allocator keeps a pool per stream."""
        return self.aside if term == "engine" else self.allocator

    def add(self, size: int, term: str) -> None:
        super().add(size, term)
        if size > 0 and not self._inside:
            self._loose.setdefault(term, []).append((self._take(size, term), size))

    def remove(self, size: int, term: str) -> None:
        super().remove(size, term)
        if size <= 0 or self._inside:
            return
        loose = self._loose.get(term, [])
        for i in range(len(loose) - 1, -1, -1):
            if loose[i][1] == size:
                self._pool(term).release(loose.pop(i)[0])
                return
        while size > 0 and loose:  # several that were added one by one go together
            handle, part = loose.pop()
            self._pool(term).release(handle)
            size -= part

    def new(self, size: int, term: str | None = None, needs_grad: bool = False) -> Paper:
        self._inside = True
        tensor = super().new(size, term, needs_grad)
        self._inside = False
        if size:
            self._of[id(tensor)] = self._take(size, tensor.term)
        return tensor

    def drop(self, *tensors: Paper) -> None:
        for tensor in tensors:
            tensor.refs -= 1
            if tensor.refs == 0:
                self._inside = True
                self.remove(tensor.bytes, tensor.term)
                self._inside = False
                handle = self._of.pop(id(tensor), None)
                if handle is not None:
                    self._pool(tensor.term).release(handle)

    def clear(self) -> None:
        """End of a step: gradients and whatever else is left go."""
        for term, loose in self._loose.items():
            for handle, _ in loose:
                self._pool(term).release(handle)
        self._loose.clear()


def replayed_bytes(
    shape: ModelShape, states: Held, question: Question, update_bytes: int, lengths: tuple[float, ...]
) -> int:
    """Bytes reserved, without expandable segments, after one optimizer step per item of `lengths`, the share of
    the micro-batch's tokens that step has."""
    allocator, aside = CachingAllocator(), CachingAllocator()
    handle = _hold(allocator, shape, states.weights + states.masters + states.gradients, 0)
    question = replace(question, every_layer=True)
    for step, share in enumerate(lengths):
        tokens = max(1, int(question.tokens * share))
        sheet = ReplaySheet(allocator, aside, handle)
        labelled, sequence = (max(1, int(n * share)) for n in (question.labelled, question.sequence))
        play(replace(question, tokens=tokens, labelled=labelled, sequence=sequence), sheet)
        handle = sheet.handle
        if step == 0:
            handle = _hold(allocator, shape, states.optimizer, handle)
        parts = _split(update_bytes, shape)
        for i, part in enumerate(parts):
            allocator.allocate(handle + 1 + i, part)
        for i in range(len(parts)):
            allocator.release(handle + 1 + i)
        handle += len(parts)
        sheet.clear()
    return allocator.reserved + aside.reserved


def _hold(allocator: CachingAllocator, shape: ModelShape, size: int, handle: int) -> int:
    for part in _split(size, shape):
        handle += 1
        allocator.allocate(handle, part)
    return handle


def _split(size: int, shape: ModelShape) -> list[int]:
    """`size` bytes in tensors whose sizes are in proportion to the model's."""
    if size <= 0:
        return []
    share = size / shape.total_parameters
    return [max(1, int(t.size * share)) for t in shape.tensors for _ in range(t.count)]
