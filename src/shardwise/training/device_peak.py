"""How much of a step's live tensors would lie on the device, told apart on a machine where all memory is the host's.

On the host are the engine's `offloaded` tensors from birth to death and, where optimizer states are offloaded, what
the update makes. What is not told apart: the copy of a layer's shard on its way between the two, which on a CPU is no
copy. Bytes of live tensors; an allocator's rounding and fragments come on top.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from shardwise.training.engines.protocol import Engine
from shardwise.training.trace.storages import ALLOCATE, FREE, StorageLog, replay

HOST = "host"


@dataclass(frozen=True)
class Split:
    """Peaks of device, host and both together, each at its own moment; `phase` and `terms` of the device's."""

    device_bytes: int
    host_bytes: int
    all_bytes: int
    phase: str
    terms: dict[str, int]


class DevicePeak:
    """Follows one engine during the steps inside `watching`; `enter` says which phase begins."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.log = StorageLog(device="cpu")
        self._classify()

    @contextmanager
    def watching(self) -> Iterator[None]:
        with self.log:
            yield
        self._classify()

    def enter(self, phase: str) -> None:
        self._classify()
        self.log.enter(phase)

    def _classify(self) -> None:
        for term, tensors in self.engine.tensors().items():
            self.log.classify(tensors, term)
        self.log.classify(self.engine.offloaded(), HOST)

    def split(self) -> Split:
        """The answer so far."""
        update_on_host = bool(self.engine.offloaded())
        host = {
            number
            for number, birth in self.log.births.items()
            if birth.term == HOST or (update_on_host and birth.phase == "step" and birth.term is None)
        }
        peaks = []
        for kinds in ((False,), (True,), (False, True)):
            events = [e for e in self.log.events if e[0] not in (ALLOCATE, FREE) or (e[1] in host) in kinds]
            found, _ = replay(events, self.log.births)
            peaks.append(found)
        phase, device = max(peaks[0].items(), key=lambda item: item[1].bytes)
        host_bytes, all_bytes = (max(p.bytes for p in found.values()) for found in peaks[1:])
        return Split(device.bytes, host_bytes, all_bytes, phase, dict(device.terms))
