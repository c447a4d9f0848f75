"""What a run takes: bytes of live tensors, resident memory, seconds.

On CUDA the caching allocator's statistics are read. On the CPU torch keeps none, so storages are followed by a
`StorageLog` during measured steps, which take about a sixth longer: the one with the largest micro-batch and, where
that is the first, whose optimizer states only come to be at its end, the largest of the others too (`heaviest`).
Where the order of rows is not known beforehand these are the first two, and any later step with a larger micro-batch
than those before. The rest of the run goes unwatched at full speed.
"""

import resource
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import psutil
import torch

from shardwise.training.batches import MicroBatch
from shardwise.training.engines.protocol import Engine
from shardwise.training.trace.storages import StorageLog

WATCHED_STEPS = 2
LOOK_AHEAD = 1000  # steps; in those after it, one with a larger micro-batch than all before is watched too
SOON = 20  # a run that is stopped so early has not been measured; a later heaviest step is not waited for


@dataclass
class Peak:
    """The run's highest moment so far."""

    bytes: int = 0
    phase: str = ""
    terms: dict[str, int] = field(default_factory=dict)
    reserved_bytes: int | None = None


class Meter:
    """Watches one rank. `method` says in words how bytes were counted."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.device = engine.device
        self.peak = Peak()
        self.watched_steps = 0
        self._largest_tokens = 0
        self._chosen: frozenset[int] | None = None
        self._ahead = 0
        self._log: StorageLog | None = None
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        elif self.device.type == "cpu":
            self._log = StorageLog(device="cpu")
            self._classify()
        self._phase = "load"
        engine.module.on_loss = lambda: self.phase("loss")

    @property
    def method(self) -> str:
        if self.device.type == "cuda":
            return "CUDA allocator statistics (max_memory_allocated), every step"
        if self.device.type == "cpu":
            steps = "1 step" if self.watched_steps == 1 else f"{self.watched_steps} steps"
            return f"bytes of live tensors, storages followed during {steps}"
        return "driver's count at the end of every phase"

    def choose(self, start: int, largest: Sequence[int]) -> None:
        """Which steps to follow, by the tokens of the largest micro-batch of every step from `start` on."""
        self._chosen, self._ahead = heaviest(start, largest), start + len(largest)

    @contextmanager
    def step(self, micro_batch_tokens: int, number: int = 0) -> Iterator[None]:
        """One optimizer step, the `number`th from 0, whose largest micro-batch has so many tokens."""
        if self._log is None:
            yield
            self._read()
            return
        fresh = self.watched_steps < WATCHED_STEPS or micro_batch_tokens > self._largest_tokens
        if self._chosen is not None and number < self._ahead:
            fresh = number in self._chosen
        if not fresh:
            yield
            return
        self.watched_steps += 1
        self._largest_tokens = max(self._largest_tokens, micro_batch_tokens)
        self._classify()
        with self._log:
            yield
        self._classify()
        for phase, peak in self._log.peaks().items():
            if phase not in ("load",) and peak.bytes > self.peak.bytes:
                self.peak = Peak(peak.bytes, phase, dict(peak.terms))

    def phase(self, name: str) -> None:
        """The step goes on to forward, backward or step."""
        if self._log is not None:
            self._log.enter(name)
            if name == "step":
                self._log.classify(_gradients(self.engine), "gradients")
        else:
            self._read()
        self._phase = name

    def inputs(self, batch: MicroBatch) -> MicroBatch:
        """Name a micro-batch's tensors; returns it."""
        if self._log is not None:
            tensors = (batch.input_ids, batch.position_ids, batch.positions, batch.targets)
            self._log.classify(tensors, "inputs")
        return batch

    @property
    def allocated_bytes(self) -> int:
        """Live now."""
        if self.device.type == "cuda":
            return torch.cuda.memory_allocated(self.device)
        if self.device.type == "mps":
            return torch.mps.current_allocated_memory()
        return self._log.live().bytes if self._log is not None else 0

    def _read(self) -> None:
        if self.device.type == "cuda":
            now = torch.cuda.max_memory_allocated(self.device)
            reserved = torch.cuda.max_memory_reserved(self.device)
        else:
            now, reserved = self.allocated_bytes, None
        if now > self.peak.bytes:
            self.peak = Peak(now, self._phase, self._long_lived(), reserved)

    def _long_lived(self) -> dict[str, int]:
        return {term: _bytes(tensors) for term, tensors in self.engine.tensors().items()}

    def _classify(self) -> None:
        assert self._log is not None
        for term, tensors in self.engine.tensors().items():
            self._log.classify(tensors, term)


def heaviest(start: int, largest: Sequence[int]) -> frozenset[int]:
    """Which steps to follow, by tokens of the largest micro-batch of every step from `start` on.

    The largest of all; where that is the first, the largest of the others too; where it is far off, the second.
    """
    if len(largest) < 2:
        return frozenset({start})
    top = max(range(1, len(largest)), key=lambda i: largest[i])
    found = {start + top}
    if largest[0] > largest[top]:
        found.add(start)
    if top > SOON:
        found.add(start + 1)
    return frozenset(found)


def resident_bytes() -> int:
    """Memory of this process that is in RAM, as the system counts it."""
    return int(psutil.Process().memory_info().rss)


def peak_resident_bytes() -> int:
    scale = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale


def _gradients(engine: Engine) -> list[torch.Tensor]:
    return [p.grad for p in engine.module.parameters() if p.grad is not None]


def _bytes(tensors: Iterable[torch.Tensor | None]) -> int:
    seen = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t is not None}
    return sum(seen.values())
