"""DeepSpeed's reduction buckets on paper (ZeRO-1 and 2): gradients leave the backward pass through a bucket.

A gradient is copied into the bucket as soon as it is complete. One that does not fit any more first has the bucket
reduced: its contents are put in a row once more, cast to the dtype of the sum, and freed again; this rank's part goes
into a buffer of its own. Two buckets exist from the first gradient to the end of the backward pass
(deepspeed/runtime/zero/stage_1_and_2.py, 0.19.8).
"""

from dataclasses import dataclass

from shardwise.estimate.memory.paper import Sheet


@dataclass(frozen=True, slots=True)
class Bucket:
    """`elements` and `width` (bytes per element) of a bucket; `reducing`: bytes per element while it is reduced.

    part: bytes of the buffer for this rank's gradients; it is made when the first of its `part_elements` are reduced,
    which are the last of `trained` to be complete. count: how many buckets there are. slice: elements of one rank's
    part, in which a tensor larger than the bucket is reduced.
    """

    elements: int
    width: int
    reducing: int
    part: int
    part_elements: int
    trained: int
    count: int = 2
    slice: int = 0

    def at_once(self, filled: int) -> int:
        """Elements that are reduced at once: slices until they are more than a bucket."""
        if filled <= self.elements or not self.slice:
            return filled
        return min(filled, (self.elements // self.slice + 1) * self.slice)

    @property
    def bytes(self) -> int:
        return self.count * self.elements * self.width


class Reducer:
    """Fills the bucket while a sheet plays the backward pass."""

    def __init__(self, bucket: Bucket) -> None:
        self.bucket = bucket
        self.filled = self.reduced = self.large = 0
        self.started = self.parted = False
        self.moments: list[tuple[int, dict[str, int], int]] = []  # of one layer: live bytes, terms, elements

    def take(self, sheet: Sheet, size: int) -> None:
        """A gradient of `size` bytes is complete; it is on the sheet as a temporary."""
        b, elements = self.bucket, size // self.bucket.width
        if not self.started:
            sheet.add(b.bytes, "engine")
            self.started = True
        self.moments.append((sheet.live, dict(sheet.terms), elements))
        if self.filled + elements > b.elements:
            self._reduce(sheet)
        self.filled += elements
        if elements > b.elements:
            self.large = size  # too large for the bucket: it waits where it is
        else:
            sheet.remove(size, "temporaries")

    def _reduce(self, sheet: Sheet) -> None:
        b = self.bucket
        sheet.flash(b.at_once(self.filled) * b.reducing)
        sheet.remove(self.large, "temporaries")
        self._count(sheet)

    def _count(self, sheet: Sheet) -> None:
        b = self.bucket
        self.reduced += self.filled
        self.filled = self.large = 0
        if not self.parted and self.reduced > b.trained - b.part_elements:
            self.parted = True
            sheet.add(b.part, "gradients")

    def skip(self, sheet: Sheet, layers: int, between: dict[str, int]) -> None:
        """Layers that are not played: each like the one whose moments were recorded, with `between` less alive."""
        b, per_layer = self.bucket, sum(between.values())
        for j in range(1, layers + 1):
            for live, terms, elements in self.moments:
                if self.filled + elements > b.elements:
                    size = b.at_once(self.filled) * b.reducing
                    height = live - j * per_layer + size
                    if height > sheet.top:
                        at = {t: v - j * between.get(t, 0) for t, v in terms.items()}
                        sheet.stood(height, {**at, "temporaries": at["temporaries"] + size})
                    self._count(sheet)
                self.filled += elements

    def finish(self, sheet: Sheet) -> None:
        """The end of the backward pass: what is left is reduced, buckets go."""
        self._reduce(sheet)
        if self.started:
            sheet.remove(self.bucket.bytes, "engine")
