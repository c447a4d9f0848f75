"""A log of storages: when each was born, how large it was, when it died.

One recorder serves three readers: the meter of a real run on the CPU (where torch keeps no allocator
statistics), the trace of a recipe on fake tensors, and the recorder of symbolic tapes. Storages are counted
once however many tensors view them, and only while something holds them.

Not seen: scratch memory inside one kernel (it is never a tensor), and what was alive before the log was
entered unless it is named with `classify`.
"""

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import torch.cpu
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

# What a storage is called when nobody says what it is, by the phase it was born in.
TERM_OF_PHASE = {
    "load": "engine",
    "forward": "activations",
    "loss": "loss",
    "backward": "temporaries",
    "step": "temporaries",
    "evaluation": "activations",
    "save": "temporaries",
}

ALLOCATE, FREE, PHASE = "a", "f", "p"
# (ALLOCATE, storage, bytes, stream) | (FREE, storage) | (PHASE, name)
Event = tuple[Any, ...]


@dataclass(frozen=True)
class Peak:
    """The moment of a phase at which most bytes were alive, and what they were, by term."""

    bytes: int
    terms: dict[str, int]


@dataclass(frozen=True)
class Place:
    """`source`: file and line, such as "transformers/models/llama/modeling_llama.py:182".

    `module`: its name in the model with every layer's number as *, or empty in a backward pass.
    """

    source: str
    module: str


@dataclass
class Birth:
    """What is known about one storage. `term` may be set late; it holds for the whole life.

    `place`: the line of source and the module that made it, where the log was asked to look.
    """

    bytes: int
    phase: str
    op: str
    term: str | None = None
    place: Place | None = None

    @property
    def name(self) -> str:
        return self.term or TERM_OF_PHASE.get(self.phase, "temporaries")


@dataclass
class _Live:
    bytes: dict[int, int] = field(default_factory=dict)
    total: int = 0


class StorageLog(TorchDispatchMode):
    """Records storages while it is entered.

    `device`: only storages of this device type count ("cpu", "cuda", "gpu"); None: all but meta.
    `round_to`: every storage is rounded up to a multiple of this many bytes; 512 as CUDA's allocator does.

    `place`: asked at every birth where in the source it happens.

    Set the phase with `enter`, say what long-lived tensors are with `classify`, and read `peaks` (per phase)
    and `peak`. A long run calls `fold` at the end of every step, so that the log does not grow.
    """

    def __init__(
        self, device: str | None = None, round_to: int = 1, place: Callable[[], Place] | None = None
    ) -> None:
        super().__init__()
        self.device, self.round_to, self.place = device, round_to, place
        self.events: list[Event] = []
        self.births: dict[int, Birth] = {}
        self.phase = "load"
        self.events.append((PHASE, "load"))
        self._ids: dict[int, int] = {}  # address of a live storage -> its number
        self._watch: dict[int, weakref.ref[Any]] = {}
        self._streams: dict[int, int] = {}
        self._op: Any = "given"
        self._count = 0
        self._live = _Live()
        self._folded: dict[str, Peak] = {}
        self._resize: Callable[..., Any] | None = None
        self._fake: Any = None

    # What the user of the log says

    def enter(self, phase: str) -> None:
        """The step goes on to this phase (one of estimate.memory.terms.PHASES)."""
        self.phase = phase
        self.events.append((PHASE, phase))

    def classify(self, tensors: Iterable[torch.Tensor | None], term: str) -> None:
        """These tensors' storages are `term` from birth to death; storages not yet seen are born now."""
        for tensor in tensors:
            if tensor is not None:
                self._see(tensor, term)

    # What the log answers

    def fold(self) -> None:
        """Take the events so far into the peaks and forget them."""
        peaks, self._live = replay(self.events, self.births, self._live)
        for phase, peak in peaks.items():
            if phase not in self._folded or peak.bytes > self._folded[phase].bytes:
                self._folded[phase] = peak
        self.events = [(PHASE, self.phase)]
        alive = self._live.bytes
        self.births = {n: b for n, b in self.births.items() if n in alive or n in self._watch}

    def peaks(self) -> dict[str, Peak]:
        """The largest moment of every phase since the log was entered or `restart`ed."""
        self.fold()
        return dict(self._folded)

    def peak(self) -> Peak:
        """The largest moment of all phases."""
        return max(self.peaks().values(), key=lambda p: p.bytes, default=Peak(0, {}))

    def live(self) -> Peak:
        """What is alive now."""
        self.fold()
        return Peak(self._live.total, _by_term(self._live.bytes, self.births))

    def alive(self) -> dict[int, int]:
        """Bytes of each storage that is alive now, by its number."""
        self.fold()
        return dict(self._live.bytes)

    def restart(self) -> None:
        """Forget the peaks, keep what is alive."""
        self.fold()
        self._folded = {}

    # How it sees

    def __enter__(self) -> "StorageLog":
        _sole_owner()  # outside of any dispatch, where autograd works
        self._fake = _fake_mode()
        self._resize = original = torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            result = original(storage, size)
            number = self._ids.get(storage._cdata)
            if number is not None and self.births[number].bytes != self._rounded(storage.nbytes()):
                self._set_size(number, storage.nbytes())
            return result

        torch.UntypedStorage.resize_ = resize_  # FSDP frees by resizing to 0
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:  # it turns this into operations on its local tensors, which come back here
            return NotImplemented
        if func is torch.ops.aten.add.Tensor and _summed_in_place(args, kwargs):
            func = torch.ops.aten.add_.Tensor
        result = self.call(func, args, kwargs or {})
        if _fake_mode() is self._fake:  # shape propagation runs operations under a fake mode of its own
            self._op = func
            for tensor in _tensors(result):
                self._see(tensor, None)
        return result

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run one operation. Traces on fake tensors override this to answer what a fake cannot."""
        return func(*args, **kwargs)

    def _see(self, tensor: torch.Tensor, term: str | None) -> None:
        kind = tensor.device.type
        if kind == "meta" or (self.device and kind != self.device):
            return
        for storage in _storages(tensor):
            key = storage._cdata
            number = self._ids.get(key)
            if number is None:
                number = self._born(storage, key, term)
            elif self.births[number].bytes != self._rounded(storage.nbytes()):
                self._set_size(number, storage.nbytes())
            if term is not None:
                self.births[number].term = term

    def _born(self, storage: torch.UntypedStorage, key: int, term: str | None) -> int:
        self._count += 1
        number, size = self._count, self._rounded(storage.nbytes())
        self._ids[key] = number
        self.births[number] = Birth(
            size, self.phase, str(self._op), term, self.place() if self.place is not None else None
        )
        if size:
            self.events.append((ALLOCATE, number, size, self._stream()))

        def died(_: Any) -> None:
            if self._ids.get(key) == number:
                del self._ids[key]
            self._watch.pop(number, None)
            if self.births[number].bytes:
                self.events.append((FREE, number))

        self._watch[number] = weakref.ref(storage, died)
        return number

    def _set_size(self, number: int, size: int) -> None:
        birth = self.births[number]
        if birth.bytes:
            self.events.append((FREE, number))
        birth.bytes = self._rounded(size)
        if birth.bytes:
            self.events.append((ALLOCATE, number, birth.bytes, self._stream()))

    def _rounded(self, size: int) -> int:
        return -(-size // self.round_to) * self.round_to

    def _stream(self) -> int:
        """0 for the default stream, else a number per stream that was made current."""
        stream = torch.cpu._current_stream
        if stream is torch.cpu._default_cpu_stream:
            return 0
        return self._streams.setdefault(id(stream), len(self._streams) + 1)


def _fake_mode() -> Any:
    """The fake mode in force, or None: as torch._guards has it, without a walk over all modes for every operation."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)


def _summed_in_place(args: Any, kwargs: Any) -> bool:
    """Whether torch's backward engine is adding up two gradients of one tensor into a buffer that nobody else holds.

    Without a dispatch mode it adds in place then (`can_accumulate_inplace` in torch/csrc/autograd/input_buffer.cpp);
    because a mode watches, it does not. Half of a large table's gradients would be counted that a run never has.
    """
    if kwargs or len(args) != 2 or torch.is_grad_enabled() or not _called_by_engine():
        return False
    into, other = args
    if type(into) is DTensor or not isinstance(other, torch.Tensor) or into.shape != other.shape:
        return False
    return into.dtype == other.dtype and _owners(into) == _sole_owner()


def _called_by_engine() -> bool:
    """No Python between the engine and the operation: not the backward of a custom function, not a recomputation."""
    frame: Any = sys._getframe(3)
    while frame is not None and frame.f_code.co_filename.endswith(("_compile.py", "eval_frame.py")):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_name == "_engine_run_backward"


def _owners(tensor: torch.Tensor) -> tuple[int, int]:
    """References to the tensor and to its storage, those of whoever asks included."""
    storage = tensor.untyped_storage()
    return tensor._use_count(), torch._C._storage_Use_Count(storage._cdata)


@cache
def _sole_owner() -> tuple[int, int]:
    """What `_owners` says, inside a dispatch mode, of a gradient that only the engine holds."""
    found: list[tuple[int, int]] = []

    class Probe(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten.add.Tensor:
                found.append(_counted(args))
            return func(*args, **(kwargs or {}))

    def _counted(args: Any) -> tuple[int, int]:
        into, _ = args
        return _owners(into)

    with torch.enable_grad(), unset_fake_temporarily(), Probe():
        x = torch.ones(2, 2, requires_grad=True) * 1
        weight = torch.ones(2, 2)
        torch.stack([x @ weight, x @ weight]).sum().backward()
    return found[-1]


def _walk(events: Iterable[Event], start: _Live | None) -> Iterator[tuple[str, _Live]]:
    """(phase, what is alive) after every event; the same object each time, changed in place."""
    live = _Live(dict(start.bytes), start.total) if start else _Live()
    phase = "load"
    for event in events:
        if event[0] == ALLOCATE:
            live.bytes[event[1]] = event[2]
            live.total += event[2]
        elif event[0] == FREE:
            live.total -= live.bytes.pop(event[1], 0)
        else:
            phase = event[1]
        yield phase, live


def replay(
    events: Iterable[Event], births: dict[int, Birth], start: _Live | None = None
) -> tuple[dict[str, Peak], _Live]:
    """Events -> (peak per phase, what is alive at the end).

    A phase's peak counts what was alive when the phase began.
    """
    events = list(events)
    # First walk: the height of each phase's peak; second walk: who was there.
    highest: dict[str, int] = {}
    end = _Live(dict(start.bytes), start.total) if start else _Live()
    for phase, now in _walk(events, start):
        highest[phase] = max(highest.get(phase, -1), now.total)
        end = now
    best: dict[str, Peak] = {}
    for phase, now in _walk(events, start):
        if phase not in best and now.total == highest[phase]:
            best[phase] = Peak(now.total, _by_term(now.bytes, births))
    return best, end


def parts_at_peak(
    events: Iterable[Event], births: dict[int, Birth], phase: str, start: dict[int, int]
) -> list[tuple[int, int, Birth]]:
    """What was alive at the highest moment of `phase`: (bytes, how many storages, one of them), largest first.

    Storages of one term, place and operation are one line. `start`: bytes of what was alive before the events.
    """
    events, begin = list(events), _Live(dict(start), sum(start.values()))
    highest = max((now.total for name, now in _walk(events, begin) if name == phase), default=0)
    for name, now in _walk(events, begin):
        if name == phase and now.total == highest:
            found: dict[tuple[Any, ...], list[int]] = {}
            for number, size in now.bytes.items():
                birth = births[number]
                group = found.setdefault((birth.name, birth.place, birth.op), [0, 0, number])
                group[0], group[1] = group[0] + size, group[1] + 1
            return sorted(((b, n, births[k]) for b, n, k in found.values()), key=lambda part: -part[0])
    return []


def _by_term(live: dict[int, int], births: dict[int, Birth]) -> dict[str, int]:
    terms: dict[str, int] = {}
    for number, size in live.items():
        name = births[number].name
        terms[name] = terms.get(name, 0) + size
    return terms


def _storages(tensor: torch.Tensor) -> Sequence[torch.UntypedStorage]:
    """The storages under a tensor: one, or those of a wrapper's parts (DTensor, quantised tensors)."""
    if not is_traceable_wrapper_subclass(tensor):
        return (tensor.untyped_storage(),)
    parts = (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
    return [s for part in parts if isinstance(part, torch.Tensor) for s in _storages(part)]


def _tensors(result: Any) -> Sequence[torch.Tensor]:
    if isinstance(result, torch.Tensor):
        return (result,)
    return [t for item in result for t in _tensors(item)] if isinstance(result, list | tuple) else ()
