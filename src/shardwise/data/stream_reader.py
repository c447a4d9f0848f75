"""One rank's share of a stream, step by step: lanes read ahead by threads, places kept to come back to."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from queue import Empty, Full, Queue
from threading import Event, Thread
from typing import Any

from shardwise.data.build import Account
from shardwise.data.order import Bin
from shardwise.data.stream import Block, Lane, Place, StreamSpec, add
from shardwise.data.tokenizer import shared_tokenizer
from shardwise.errors import DataError

_EMPTY_BLOCKS = 3  # in a row, after which nothing more is expected
_PLACES = 3  # checkpoints that a run may go back to


class _Ahead:
    """Blocks of a lane, made by a thread while the ones before are trained on."""

    def __init__(self, blocks: Iterator[Block]) -> None:
        self._made: Queue[Block | BaseException] = Queue(1)
        self._stop = Event()
        self._thread = Thread(target=self._make, args=(blocks,), daemon=True, name="rows")
        self._thread.start()

    def _make(self, blocks: Iterator[Block]) -> None:
        try:
            for block in blocks:
                self._put(block)
                if self._stop.is_set():
                    return
        except BaseException as problem:
            self._put(problem)
        finally:
            blocks.close()  # type: ignore[attr-defined]

    def _put(self, item: Block | BaseException) -> None:
        while not self._stop.is_set():
            try:
                return self._made.put(item, timeout=0.2)
            except Full:  # look again whether it is still wanted
                continue

    def next(self, waiting: Callable[[], None]) -> Block:
        while True:
            try:
                found = self._made.get(timeout=1.0)
            except Empty:
                waiting()
                continue
            if isinstance(found, BaseException):
                raise found
            return found

    def close(self) -> None:
        self._stop.set()
        self._thread.join(timeout=10.0)


class LaneReader:
    """A lane's packed sequences by number: forwards, and back to what the last checkpoints hold."""

    def __init__(self, lane: Lane, start: Place | None, waiting: Callable[[], None]) -> None:
        self._lane, self._waiting = lane, waiting
        self._places: list[Place] = [start or lane.beginning()]
        self._marked: deque[int] = deque([self._places[0].sequences], _PLACES)
        self._ahead: _Ahead | None = None
        self._block: Block | None = None
        self._empty = 0

    def sequence(self, number: int) -> tuple[Block, Bin]:
        """The packed sequence of that number. Raises DataError when nothing usable comes any more."""
        block = self._at(number)
        return block, block.bins[number - block.place.sequences]

    def mark(self, number: int) -> Place:
        """The place to begin at for sequence `number` to be next; it can be gone back to."""
        place = self._before(number)
        self._marked.append(place.sequences)
        self._places = [p for p in self._places if p.sequences >= self._marked[0]]
        return place

    def account(self, number: int) -> tuple[Account, int]:
        """What was read for the sequences before `number`, and how many rows of files are in them."""
        place = self._before(number)
        total = Account.load(place.account)
        if self._block is None or self._block.place is not place:
            return total, place.used
        add(total, self._block.account)
        return total, place.used + self._block.used(number - place.sequences)

    def close(self) -> None:
        if self._ahead is not None:
            self._ahead.close()
        self._ahead = None

    def _before(self, number: int) -> Place:
        if number <= self._places[0].sequences:
            return self._places[0]
        return self._at(number - 1).place

    def _at(self, number: int) -> Block:
        if self._block is not None and number < self._block.place.sequences:
            self._go_back(number)
        while self._block is None or number >= self._block.end:
            if self._ahead is None:
                self._ahead = _Ahead(self._lane.blocks(self._places[-1]))
            self._block = self._ahead.next(self._waiting)
            self._empty = 0 if self._block.bins else self._empty + 1
            if self._empty >= _EMPTY_BLOCKS:
                raise self._dry(self._block.account)
            if self._block.place == self._places[-1]:
                self._places.pop()
            self._places.append(self._block.place)
        return self._block

    def _dry(self, account: Account) -> DataError:
        reasons = [f"{t.count} x {reason}" for reason, t in (account.refused | account.dropped).items()]
        return DataError(
            f"{_EMPTY_BLOCKS * self._lane.spec.buffer_rows:,} rows in a row gave nothing to train on",
            "; ".join(reasons[:3]),
            "look at the files with: shardwise data check",
        )

    def _go_back(self, number: int) -> None:
        self.close()
        while len(self._places) > 1 and self._places[-1].sequences > number:
            self._places.pop()
        if self._places[-1].sequences > number:
            raise IndexError(f"sequence {number} lies before the places that are kept")
        self._block = None


class StreamReader:
    """The share of one rank: sequence j of a step belongs to rank j modulo `world_size`, from lane j modulo `lanes`.

    The number of lanes is that of the ranks at the start of a run, and stays when it goes on with others.
    `position`: what `position` of all ranks together gave, to go on from there.
    """

    def __init__(
        self,
        spec: StreamSpec,
        global_batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        workers: int = 1,
        position: Mapping[str, Any] | None = None,
        waiting: Callable[[], None] = lambda: None,
    ) -> None:
        self.spec, self.size, self.rank, self.world_size = spec, global_batch_size, rank, world_size
        self.lanes = int(position["lanes"]) if position else world_size
        if self.size % self.lanes:
            raise DataError(
                f"a step of {self.size} sequences cannot be taken evenly from {self.lanes} parts of a stream",
                "every rank reads one part",
                f"set training.global_batch_size to a multiple of {self.lanes}",
            )
        tokenizer = shared_tokenizer(spec.encoder.model, spec.encoder.trust_remote_code)
        _ = tokenizer.backend, tokenizer.splits  # made once, before threads share them
        places = position["places"] if position else {}
        self._readers = {
            lane: LaneReader(
                Lane(spec, lane, self.lanes, workers),
                Place.load(places[str(lane)]) if position else None,
                waiting,
            )
            for lane in sorted({j % self.lanes for j in range(rank, self.size, world_size)})
        }

    def sequences(self, step: int) -> list[tuple[Block, Bin]]:
        """This rank's packed sequences of a step."""
        each = self.size // self.lanes
        return [
            self._readers[j % self.lanes].sequence(step * each + j // self.lanes)
            for j in range(self.rank, self.size, self.world_size)
        ]

    def position(self, step: int) -> dict[str, dict[str, Any]]:
        """Lane -> place when `step` steps are done, of the lanes that this rank answers for."""
        return {str(i): r.mark(self._number(step)).to_dict() for i, r in self._mine()}

    def account(self, step: int) -> tuple[Account, int]:
        """What was read for the first `step` steps, and how many rows were used, of this rank's lanes."""
        total, used = Account(), 0
        for _, reader in self._mine():
            account, rows = reader.account(self._number(step))
            add(total, account)
            used += rows
        return total, used

    def close(self) -> None:
        for reader in self._readers.values():
            reader.close()

    def _number(self, step: int) -> int:
        return step * (self.size // self.lanes)

    def _mine(self) -> list[tuple[int, LaneReader]]:
        """Each lane is answered for by one rank, however many read it."""
        return [(i, r) for i, r in self._readers.items() if i % self.world_size == self.rank]
