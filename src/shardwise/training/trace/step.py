"""One optimizer step of a recipe on fake tensors: what it would allocate, without a GPU and without the weights."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch._guards import active_fake_mode

from shardwise.errors import RuleError
from shardwise.recipe.schema import Recipe
from shardwise.training.batches import MicroBatch
from shardwise.training.engines.protocol import Engine, Ranks
from shardwise.training.model import LossModel, ModelFolder
from shardwise.training.trace.fake import FakeLog, build_fake, fakes, outside
from shardwise.training.trace.storages import Birth, Event, Peak

CUDA_ROUNDING = 512


@dataclass(frozen=True)
class Traced:
    """A traced step. `peaks` are per phase, of the second step, in which optimizer states exist from the start."""

    peaks: dict[str, Peak]
    events: list[Event]
    births: dict[int, Birth]

    @property
    def peak(self) -> tuple[str, Peak]:
        phase = max(self.peaks, key=lambda p: self.peaks[p].bytes)
        return phase, self.peaks[phase]


def trace(
    recipe: Recipe,
    folder: ModelFolder,
    documents: Sequence[Sequence[int]],
    world_size: int = 1,
    device: str = "cuda",
    say: Callable[[str], None] = lambda _: None,
) -> Traced:
    """Trace rank 0 of `world_size`. `documents`: for each micro-batch of a step, the lengths of its documents.

    Raises RuleError for engines that do not run on fake tensors; those have a formula.
    """
    round_to = CUDA_ROUNDING if device == "cuda" else 1
    with _group(world_size), fakes(device):
        log = FakeLog(round_to=round_to)
        with log:
            say("building the model")
            module = build_fake(recipe, folder)
            log.classify([*module.parameters(), *module.buffers()], "weights")
            engine = _engine(recipe, module, world_size, len(documents))
            _classify(log, engine)
            for number in (1, 2):
                say(f"step {number} of 2")
                log.restart()
                _step(log, engine, recipe, documents)
            events, births = list(log.events), dict(log.births)
            return Traced(log.peaks(), events, births)


def _engine(recipe: Recipe, module: LossModel, world_size: int, micro_batches: int) -> Engine:
    device, ranks = torch.device("cpu"), Ranks(world_size=world_size)
    if recipe.engine.name == "single":
        from shardwise.training.engines.single import SingleEngine

        return SingleEngine(module, recipe, device, micro_batches > 1)
    if recipe.engine.name == "fsdp2":
        from shardwise.training.engines import fsdp2

        mode, make = active_fake_mode(), fsdp2._mesh
        assert mode is not None

        def real_mesh(*arguments: Any) -> Any:  # ranks have numbers, also when tensors have none
            with outside(mode):
                return make(*arguments)

        with mock.patch.object(fsdp2, "_mesh", real_mesh):
            return fsdp2.Fsdp2Engine(module, recipe, device, ranks, micro_batches > 1)
    raise RuleError(
        f"engine {recipe.engine.name} is not traced",
        "its reducer reads gradients, which fake tensors do not have",
        "read its memory with: shardwise plan, which has a formula for it",
    )


def _step(log: FakeLog, engine: Engine, recipe: Recipe, documents: Sequence[Sequence[int]]) -> None:
    for i, lengths in enumerate(documents):
        log.enter("forward")
        batch = micro_batch(lengths)
        log.classify([batch.input_ids, batch.position_ids, batch.positions, batch.targets], "inputs")
        loss = engine.forward(batch)
        log.enter("backward")
        engine.backward(loss, 1.0, last=i == len(documents) - 1)
        del loss, batch
    _classify(log, engine)
    log.enter("step")
    rate = recipe.optimizer.learning_rate
    engine.step(1e-4 if rate == "auto" else rate, recipe.optimizer.max_grad_norm)
    _classify(log, engine)


def _classify(log: FakeLog, engine: Engine) -> None:
    for term, tensors in engine.tensors().items():
        log.classify(tensors, term)


def micro_batch(lengths: Sequence[int]) -> MicroBatch:
    """Documents of these lengths, every token but each first one a target; fake inside a fake mode."""
    total, targets = sum(lengths), sum(n - 1 for n in lengths)
    return MicroBatch(
        input_ids=torch.empty((1, total), dtype=torch.int64),
        position_ids=torch.empty((1, total), dtype=torch.int64),
        positions=torch.empty((targets,), dtype=torch.int64),
        targets=torch.empty((targets,), dtype=torch.int64),
        document_lengths=tuple(lengths),
    )


@contextmanager
def _group(world_size: int) -> Iterator[None]:
    """A process group of `world_size` ranks of which only this one exists."""
    if world_size == 1:
        yield
        return
    import torch.distributed.tensor._sharding_prop as propagation
    from torch.testing._internal.distributed.fake_pg import FakeStore

    detect = propagation.detect_fake_mode
    propagation.detect_fake_mode = lambda *_, **__: None  # its shadow tensors have the global shape
    dist.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
        propagation.detect_fake_mode = detect
