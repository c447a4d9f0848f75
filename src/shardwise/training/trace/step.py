"""One optimizer step of a recipe on fake tensors: what it would allocate, without a GPU and without the weights."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch._guards import active_fake_mode

from shardwise.recipe.schema import Recipe
from shardwise.training.batches import MicroBatch
from shardwise.training.engines.protocol import Engine, Ranks
from shardwise.training.model import LossModel, ModelFolder
from shardwise.training.trace.ddp import Reducer
from shardwise.training.trace.deepspeed import stand_ins
from shardwise.training.trace.fake import FakeLog, build_fake, fakes, outside, quantisation
from shardwise.training.trace.gpu import gpu
from shardwise.training.trace.places import places
from shardwise.training.trace.storages import Birth, Event, Peak, parts_at_peak

CUDA_ROUNDING = 512


@dataclass(frozen=True)
class Traced:
    """A traced step. `peaks` are per phase, of the second step, in which optimizer states exist from the start."""

    peaks: dict[str, Peak]
    events: list[Event]
    births: dict[int, Birth]
    start: dict[int, int]  # bytes of each storage that was alive before the step

    def parts(self, phase: str) -> list[tuple[int, int, Birth]]:
        """What was alive at the highest moment of `phase`: (bytes, storages, one of them), largest first."""
        return parts_at_peak(self.events, self.births, phase, self.start)

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
    apart = device == "cuda" and (recipe.engine.name == "deepspeed" or recipe.engine.fsdp2.cpu_offload)
    place = gpu() if apart else torch.device("cpu")
    with ExitStack() as stack:
        if recipe.engine.name == "deepspeed":
            stack.enter_context(stand_ins(on_gpu=apart))
        stack.enter_context(_group(world_size, always=recipe.engine.name == "deepspeed"))
        stack.enter_context(fakes(device))
        log = FakeLog(round_to=round_to, device=place.type)
        with log:
            say("building the model")
            module = build_fake(recipe, folder, place)
            log.classify([*module.parameters(), *module.buffers(), *quantisation(module)], "weights")
            engine = _engine(recipe, module, world_size, len(documents), place)
            _classify(log, engine)
            module.on_loss = lambda: log.enter("loss")
            with places(module) as log.place:
                for number in (1, 2):
                    say(f"step {number} of 2")
                    log.restart()
                    start = log.alive()
                    _step(log, engine, recipe, documents)
            events, births = list(log.events), dict(log.births)
            return Traced(log.peaks(), events, births, start)


def _engine(
    recipe: Recipe, module: LossModel, world_size: int, micro_batches: int, device: torch.device
) -> Engine:
    ranks = Ranks(world_size=world_size)
    if recipe.engine.name == "single":
        from shardwise.training.engines.single import SingleEngine

        return SingleEngine(module, recipe, device, micro_batches > 1)
    if recipe.engine.name == "ddp":
        from shardwise.training.engines import ddp

        with mock.patch.object(ddp, "DistributedDataParallel", Reducer):
            return ddp.DdpEngine(module, recipe, device, ranks, micro_batches > 1)
    if recipe.engine.name == "deepspeed":
        from shardwise.training.engines.deepspeed import DeepSpeedEngine

        return DeepSpeedEngine(module, recipe, device, ranks, micro_batches)
    from shardwise.training.engines import fsdp2

    mode, make = active_fake_mode(), fsdp2._mesh
    assert mode is not None

    def real_mesh(*arguments: Any) -> Any:  # ranks have numbers, also when tensors have none
        with outside(mode):
            return make(*arguments)

    with mock.patch.object(fsdp2, "_mesh", real_mesh):
        return fsdp2.Fsdp2Engine(module, recipe, device, ranks, micro_batches > 1)


def _step(log: FakeLog, engine: Engine, recipe: Recipe, documents: Sequence[Sequence[int]]) -> None:
    for i, lengths in enumerate(documents):
        log.enter("forward")
        batch = micro_batch(lengths).to(engine.device)
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
def _group(world_size: int, always: bool = False) -> Iterator[None]:
    """A process group of `world_size` ranks of which only this one exists. `always`: also of one rank."""
    if world_size == 1 and not always:
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
