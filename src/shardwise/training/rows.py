"""A run's rows on a rank: from the cache that the launcher filled, by the same key, or from a stream."""

import os
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from shardwise.data import Bin, Prepared, Rows, prepare
from shardwise.data.stream import StreamSpec
from shardwise.data.stream_reader import StreamReader
from shardwise.data.streaming import stream_steps
from shardwise.recipe.schema import Data, Recipe
from shardwise.training.engines.protocol import Ranks
from shardwise.training.model import ModelFolder


def prepared_rows(folder: ModelFolder, section: Data) -> Prepared:
    """`section` tokenized for this model as training does it. Raises what `data.prepare` raises."""
    recipe, config = folder.recipe, folder.config().get_text_config()
    return prepare(
        section,
        folder.path,
        revision=recipe.model.revision,
        chat_template=recipe.model.chat_template,
        max_length=getattr(config, "max_position_embeddings", None),
        vocabulary=config.vocab_size,
        seed=recipe.training.seed,
    )


def stream_feed(
    prepared: Prepared,
    recipe: Recipe,
    ranks: Ranks,
    device: torch.device,
    position: Mapping[str, Any] | None,
    waiting: Callable[[], None],
) -> "StreamFeed":
    """The stream of a recipe, from its beginning or from the `position` that a checkpoint kept."""
    size = recipe.training.global_batch_size
    assert prepared.stream is not None and size != "auto"
    steps = stream_steps(recipe, prepared.sequence_length, size)
    return StreamFeed(prepared.stream, steps, size, ranks, device, position, waiting)


def account_text(told: Mapping[str, Any]) -> str:
    """What `StreamFeed.account` counted, in words."""
    text = (
        f"rows  {told['read']:,} read = {told['used']:,} trained on + {told['refused']:,} refused + "
        f"{told['dropped']:,} dropped + {told['waiting']:,} waiting in the buffer when the last step came"
    )
    for reason, (number, places) in told["reasons"].items():
        text += f"\n      {number:,} x {reason} ({', '.join(f'{file} line {line}' for file, line in places)})"
    return text


class StreamFeed:
    """A stream in the place of an `Order` and of its `Rows`: each rank knows its own rows only.

    Rows are numbered within the step that was asked for last. Counts of all ranks take one collective a step.
    """

    def __init__(
        self,
        spec: StreamSpec,
        steps: int,
        global_batch_size: int,
        ranks: Ranks,
        device: torch.device,
        position: Mapping[str, Any] | None = None,
        waiting: Callable[[], None] = lambda: None,
    ) -> None:
        self.steps, self.sequence_length = steps, spec.sequence_length
        self._ranks, self._device = ranks, device
        workers = os.environ.get("SHARDWISE_WORKERS", "")
        self._reader = StreamReader(
            spec,
            global_batch_size,
            ranks.rank,
            ranks.world_size,
            int(workers) if workers.isdigit() and int(workers) else 1,
            position,
            waiting,
        )
        self._step = -1
        self._rows: list[tuple[Rows, int]] = []
        self._bins: list[Bin] = []
        self._counts = (0, 0)

    def micro_batches(
        self, step: int, rank: int, world_size: int, micro_batch_size: int
    ) -> tuple[tuple[Bin, ...], ...]:
        """As `Order.micro_batches`, of this rank."""
        assert (rank, world_size) == (self._ranks.rank, self._ranks.world_size)
        self._read(step)
        each = -(-self._reader.size // world_size)
        count = -(-each // micro_batch_size)
        return tuple(
            tuple(self._bins[i * micro_batch_size : (i + 1) * micro_batch_size]) for i in range(count)
        )

    def step(self, step: int) -> tuple[Bin, ...]:
        """This rank's packed sequences of a step."""
        self._read(step)
        return tuple(self._bins)

    def tokens(self, step: int) -> int:
        """Tokens of a step, over all ranks."""
        self._read(step)
        return self._counts[0]

    def trained_tokens(self, step: int) -> int:
        """Tokens with a label of a step, over all ranks."""
        self._read(step)
        return self._counts[1]

    def passes(self, step: int) -> float | None:
        """Nobody knows how much of a stream that is."""
        return None

    def row(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        rows, number = self._rows[i]
        return rows.row(number)

    def source(self, i: int) -> tuple[str, int]:
        rows, number = self._rows[i]
        return rows.source(number)

    def position(self, step: int) -> dict[str, Any]:
        """What it takes to go on after `step` steps (collective)."""
        places: dict[str, Any] = {}
        for part in self._gathered(self._reader.position(step)):
            places.update(part)
        return {"lanes": self._reader.lanes, "places": places}

    def account(self, step: int) -> dict[str, Any]:
        """What became of every row read for the first `step` steps (collective).

        read = used + refused + dropped + waiting (tokenized, and not reached by a step).
        """
        found, used = self._reader.account(step)
        told: dict[str, Any] = {"read": 0, "used": 0, "refused": 0, "dropped": 0, "reasons": {}}
        reasons: dict[str, Any] = {}
        mine = {"read": sum(found.rows_read.values()), "used": used, "reasons": reasons}
        for name, tallies in (("refused", found.refused), ("dropped", found.dropped)):
            mine[name] = sum(t.count for t in tallies.values())
            reasons |= {reason: [t.count, t.places[:3]] for reason, t in tallies.items()}
        for part in self._gathered(mine):
            for name in ("read", "used", "refused", "dropped"):
                told[name] += part[name]
            for reason, (number, places) in part["reasons"].items():
                before, shown = told["reasons"].get(reason, (0, []))
                told["reasons"][reason] = [before + number, [*shown, *places][:3]]
        told["waiting"] = told["read"] - told["used"] - told["refused"] - told["dropped"]
        return told

    def close(self) -> None:
        self._reader.close()

    def _read(self, step: int) -> None:
        """Collective when `step` is another one than before."""
        if step == self._step:
            return
        self._rows, self._bins = [], []
        for block, one in self._reader.sequences(step):
            first = len(self._rows)
            self._rows += [(block.rows, i) for i in one]
            self._bins.append(tuple(range(first, first + len(one))))
        counts = [
            sum(int(rows.lengths[i]) for rows, i in self._rows),
            sum(int(rows.trained[i]) for rows, i in self._rows),
        ]
        if self._ranks.world_size > 1:
            both = torch.tensor(counts, dtype=torch.int64, device=self._device)
            dist.all_reduce(both)
            counts = [int(n) for n in both.tolist()]
        self._counts = (counts[0], counts[1])
        self._step = step

    def _gathered(self, mine: dict[str, Any]) -> list[dict[str, Any]]:
        if self._ranks.world_size == 1:
            return [mine]
        found: list[Any] = [None] * self._ranks.world_size
        dist.all_gather_object(found, mine)
        return found
