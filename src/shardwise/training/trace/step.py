"""One optimizer step of a recipe on fake tensors: what it would allocate, without a GPU and without the weights."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch._guards import active_fake_mode
from torch.distributed.device_mesh import init_device_mesh

from shardwise.recipe.schema import Recipe
from shardwise.training.batches import MicroBatch
from shardwise.training.checkpoint import save
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
    """A traced step. `peaks` are per phase, of the second step, in which optimizer states exist from the start, and
    of an evaluation and a save after it. `copied_bytes`: of the state, in host memory, while a save is written in the
    background; 0 where training waits for it.
    """

    peaks: dict[str, Peak]
    events: list[Event]
    births: dict[int, Birth]
    start: dict[int, int]  # bytes of each storage that was alive before the step
    copied_bytes: int = 0

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
    rank: int = 0,
) -> Traced:
    """Trace `rank` of `world_size`. `documents`: for each micro-batch of a step, the lengths of its documents.

    Raises RuleError for engines that do not run on fake tensors; those have a formula.
    """
    round_to = CUDA_ROUNDING if device == "cuda" else 1
    apart = device == "cuda" and (recipe.engine.name == "deepspeed" or recipe.engine.fsdp2.cpu_offload)
    place = gpu() if apart else torch.device("cpu")
    with ExitStack() as stack:
        if recipe.engine.name == "deepspeed":
            stack.enter_context(stand_ins(on_gpu=apart, rank=rank))
        stack.enter_context(_group(world_size, rank, always=recipe.engine.name == "deepspeed"))
        stack.enter_context(fakes(device))
        log = FakeLog(round_to=round_to, device=place.type)
        with log:
            say("building the model")
            module = build_fake(recipe, folder, place)
            log.classify([*module.parameters(), *module.buffers(), *quantisation(module)], "weights")
            engine = _engine(recipe, module, Ranks(rank, world_size), len(documents), place)
            _classify(log, engine)
            module.on_loss = lambda: log.enter("loss")
            with places(module) as log.place:
                for number in (1, 2):
                    say(f"step {number} of 2")
                    log.restart()
                    start = log.alive()
                    _step(log, engine, recipe, documents)
                say("evaluation and a save")
                _evaluate(log, engine, documents[0])
                copied = _save(log, engine, _in_background(recipe, device))
            events, births = list(log.events), dict(log.births)
            return Traced(log.peaks(), events, births, start, copied)


def _engine(
    recipe: Recipe, module: LossModel, ranks: Ranks, micro_batches: int, device: torch.device
) -> Engine:
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

    with mock.patch.object(fsdp2, "init_device_mesh", _real_mesh):
        return fsdp2.Fsdp2Engine(module, recipe, device, ranks, micro_batches > 1)


def _real_mesh(*arguments: Any, **options: Any) -> Any:
    """Ranks have numbers, also when tensors have none."""
    mode = active_fake_mode()
    assert mode is not None
    with outside(mode):
        return init_device_mesh(*arguments, **options)


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


def _evaluate(log: FakeLog, engine: Engine, lengths: Sequence[int]) -> None:
    """One batch of held-out rows, as large as a micro-batch (training/loop.py, `evaluate`)."""
    log.enter("evaluation")
    engine.module.eval()
    engine.module.on_loss = lambda: None
    with torch.no_grad():
        engine.forward(micro_batch(lengths).to(engine.device)).double()
    engine.module.train()


def _save(log: FakeLog, engine: Engine, copies: bool) -> int:
    """What a checkpoint takes: this rank's part of the state, looked at, and copied if it is written later.

    Returns the bytes of that copy, which lies in host memory.
    """
    log.enter("save")
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(save, "_finite", lambda t: torch.isfinite(t).all() is not None))
        if engine.name == "deepspeed":
            from shardwise.training.engines import deepspeed

            stack.enter_context(mock.patch.object(deepspeed, "init_device_mesh", _real_mesh))
        _, mine, _ = save.part_of_state(engine)
    if not copies:
        return 0
    if engine.device.type == "cpu" and log.round_to == 1:  # a run on CPUs: the host's memory is the device's
        copied = [t.detach().to("cpu", copy=True) for _, t in mine.values()]
        return sum(t.nbytes for t in copied)
    return sum(t.nbytes for _, t in mine.values())


def _in_background(recipe: Recipe, device: str) -> bool:
    asked = recipe.checkpoint.background
    return device == "cuda" if asked is None else asked


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
def _group(world_size: int, rank: int, always: bool = False) -> Iterator[None]:
    """A process group of `world_size` ranks of which only `rank` exists. `always`: also of one rank."""
    if world_size == 1 and not always:
        yield
        return
    import torch.distributed.tensor._sharding_prop as propagation
    from torch.testing._internal.distributed.fake_pg import FakeStore

    detect = propagation.detect_fake_mode
    propagation.detect_fake_mode = lambda *_, **__: None  # its shadow tensors have the global shape
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
        propagation.detect_fake_mode = detect
