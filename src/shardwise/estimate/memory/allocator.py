"""PyTorch's CUDA caching allocator on paper: allocations and frees in order -> bytes reserved from the card.

Rules (c10/cuda/CUDACachingAllocator.cpp): sizes are rounded up to 512 B. Up to 1 MiB come from small segments of
2 MiB; from 1 to 10 MiB out of segments of 20 MiB; larger ones get segments rounded to 2 MiB. The smallest free
block that is large enough is taken and split, small ones always, large ones if more than 1 MiB remains. Neighbours
merge when freed. Segments are never given back, except all free ones at once when the card is full; that is not
played here. With expandable segments, a pool is one segment that grows in pages, so there are hardly any holes.
"""

from bisect import bisect_left, insort

MIB = 2**20
SMALL, SMALL_SEGMENT, MIDDLE, MIDDLE_SEGMENT, LARGE_ROUND = MIB, 2 * MIB, 10 * MIB, 20 * MIB, 2 * MIB


class _Block:
    __slots__ = ("address", "free", "next", "previous", "segment", "size", "small")

    def __init__(self, segment: int, address: int, size: int, small: bool) -> None:
        self.segment, self.address, self.size, self.small = segment, address, size, small
        self.previous: _Block | None = None
        self.next: _Block | None = None
        self.free = True


class CachingAllocator:
    """Play `allocate` and `release`; read `reserved` (it never falls) and `allocated`."""

    def __init__(self) -> None:
        self.reserved = self.allocated = self.peak_allocated = 0
        self._segments = 0
        self._free: dict[bool, list[tuple[int, int, int]]] = {True: [], False: []}  # (size, segment, address)
        self._blocks: dict[tuple[int, int], _Block] = {}
        self._used: dict[int, _Block] = {}

    def allocate(self, handle: int, size: int) -> None:
        size = max(512, -(-size // 512) * 512)
        small = size <= SMALL
        free = self._free[small]
        place = bisect_left(free, (size, -1, -1))
        if place < len(free):
            _, segment, address = free.pop(place)
            block = self._blocks[segment, address]
        else:
            block = self._segment(size, small)
        rest = block.size - size
        if rest >= 512 if small else rest > SMALL:
            self._split(block, size)
        block.free = False
        self._used[handle] = block
        self.allocated += block.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)

    def release(self, handle: int) -> None:
        block = self._used.pop(handle)
        self.allocated -= block.size
        block.free = True
        if block.previous is not None and block.previous.free:
            before = block.previous
            self._forget(before)
            self._join(before, block)
            block = before
        if block.next is not None and block.next.free:
            after = block.next
            self._forget(after)
            self._join(block, after)
        insort(self._free[block.small], (block.size, block.segment, block.address))

    def _segment(self, size: int, small: bool) -> _Block:
        if small:
            length = SMALL_SEGMENT
        elif size < MIDDLE:
            length = MIDDLE_SEGMENT
        else:
            length = -(-size // LARGE_ROUND) * LARGE_ROUND
        self._segments += 1
        block = _Block(self._segments, 0, length, small)
        self._blocks[block.segment, 0] = block
        self.reserved += length
        return block

    def _split(self, block: _Block, size: int) -> None:
        rest = _Block(block.segment, block.address + size, block.size - size, block.small)
        rest.previous, rest.next = block, block.next
        if block.next is not None:
            block.next.previous = rest
        block.next, block.size = rest, size
        self._blocks[rest.segment, rest.address] = rest
        insort(self._free[rest.small], (rest.size, rest.segment, rest.address))

    def _forget(self, block: _Block) -> None:
        free = self._free[block.small]
        free.pop(bisect_left(free, (block.size, block.segment, block.address)))

    def _join(self, left: _Block, right: _Block) -> None:
        left.size += right.size
        left.next = right.next
        if right.next is not None:
            right.next.previous = left
        del self._blocks[right.segment, right.address]
