"""The search by bounds answers what looking at every candidate answers."""

from collections.abc import Iterator

import pytest

from shardwise.estimate.speed import step_seconds
from shardwise.estimate.stack import Checkpointing
from shardwise.facts.catalogue import catalogue_shape
from shardwise.facts.gpus import load_prices, parse_offer
from shardwise.plan.fastest import EQUAL, Grid, fastest
from shardwise.plan.model import DataFacts, host_problem, verdict
from shardwise.plan.question import Question
from shardwise.plan.search import METHODS, answer, grids

PRICES = load_prices()
CASES = (
    ("meta-llama/Llama-3.1-8B", "8xH100-80GB", 2048),
    ("meta-llama/Llama-3.1-8B", "1xRTX4090", 4096),
    ("meta-llama/Llama-3.1-8B", "2xA40", 512),
    ("meta-llama/Llama-3.1-70B", "16xA100-80GB", 2048),
    ("Qwen/Qwen3-30B-A3B", "4xL40S", 1024),
    ("google/gemma-2-9b", "4xA10G", 2048),
    ("HuggingFaceTB/SmolLM2-135M", "1xT4", 300),
    ("Qwen/Qwen2.5-7B", "8xRTX3090", 8192),
)


def question(name: str, gpus: str, length: int) -> Question:
    shape = catalogue_shape(name)
    assert shape is not None
    return Question(
        shape, PRICES, data=DataFacts(tokens=10**7), offers=(parse_offer(gpus),), sequence_length=length
    )


def every_grid(asked: Question) -> Iterator[Grid]:
    for method in METHODS:
        yield from grids(asked, method, asked.offers[0])


@pytest.mark.parametrize(("name", "gpus", "length"), CASES)
def test_bounds_find_what_trying_everything_finds(name: str, gpus: str, length: int) -> None:
    """Per kind of checkpointing the fastest that fits; a later kind only if faster by what counts.

    After none come numbers of layers: of every micro-batch the least that fits.
    """
    asked = question(name, gpus, length)
    offer = asked.offers[0]
    for grid in every_grid(asked):

        def fits(kind: Checkpointing, micro: int, grid: Grid = grid) -> bool:
            memory, stack = grid.memory(kind, micro), grid.stack(kind, micro)
            if verdict(memory, offer.gpu.usable_bytes) != "fits":
                return False
            return not host_problem(asked.shape, stack, offer, memory)

        def seconds(kind: Checkpointing, micro: int, grid: Grid = grid) -> float:
            return step_seconds(asked.shape, offer.gpu, grid.stack(kind, micro))

        best: tuple[Checkpointing, float] | None = None
        for kind in grid.kinds:
            fitting = [m for m in grid.micros if fits(kind, m)]
            if fitting and (best is None or seconds(kind, fitting[-1]) < EQUAL * best[1]):
                best = kind, min(seconds(kind, m) for m in fitting)
            if kind == "none":
                for micro in (m for m in grid.micros if m not in fitting):
                    layers = range(1, asked.shape.num_hidden_layers)
                    least = next((k for k in layers if fits(k, micro)), None)
                    if least and (best is None or seconds(least, micro) < EQUAL * best[1]):
                        best = least, seconds(least, micro)
        found = fastest(grid, offer)
        assert found is not None
        every = [(kind, micro) for kind in grid.kinds for micro in grid.micros]
        if best is None:
            assert not found.sure
            assert found.memory.needed_bytes == min(grid.memory(*at).needed_bytes for at in every), grid.base
        else:
            kind, least = best
            assert found.sure and found.stack.activation_checkpointing == kind, grid.base
            time = seconds(kind, found.stack.micro_batch_size)
            assert EQUAL * time <= least, grid.base
            if isinstance(kind, int):
                continue
            smaller = [m for m in grid.micros if m < found.stack.micro_batch_size and fits(kind, m)]
            assert not smaller or EQUAL * seconds(kind, smaller[-1]) > least, grid.base


@pytest.mark.parametrize(("name", "gpus", "length"), CASES[:5])
def test_the_bound_is_below_every_estimate(name: str, gpus: str, length: int) -> None:
    for grid in every_grid(question(name, gpus, length)):
        for kind in grid.kinds:
            for micro in grid.micros:
                assert grid.at_least(kind, micro) <= grid.memory(kind, micro).needed_bytes, (
                    grid.base,
                    kind,
                    micro,
                )


@pytest.mark.parametrize(("name", "gpus", "length"), CASES)
def test_the_best_engine_alone_is_the_first_of_all(name: str, gpus: str, length: int) -> None:
    """Searching for one engine per method finds what ranks first when all engines are searched, or its equal."""
    from dataclasses import replace

    asked = question(name, gpus, length)
    every, best = answer(asked), answer(replace(asked, best_only=True))
    assert every.tried == best.tried
    for method in METHODS:
        of = [o.plan for o in every.options if o.plan.stack.method == method]
        mine = [o.plan for o in best.options if o.plan.stack.method == method]
        assert len(mine) == min(1, len(of)), method
        if mine:
            assert mine[0].verdict == of[0].verdict
            assert mine[0].speed.step_seconds <= 1.035 * of[0].speed.step_seconds
