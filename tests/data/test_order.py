"""The order of rows: pure, exact, disjoint over ranks, the same after a resume."""

import sysconfig
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.data import Order, make_order
from shardwise.data.packing import pack
from shardwise.data.store import ROW, Rows, Store
from shardwise.errors import DataError


def rows_of(
    lengths: list[int], sources: list[int] | None = None, weights: tuple[float, ...] = (1.0,)
) -> Rows:
    """Rows with these lengths and no tokens behind them."""
    n = len(lengths)
    records = np.zeros(n, ROW)
    records["end"] = np.cumsum(lengths)
    records["source"] = sources if sources is not None else 0
    store = Store(
        Path("."), ("f",), np.zeros(sum(lengths), np.int32), np.ones(sum(lengths), np.uint8), records
    )
    size = np.asarray(lengths, np.int64)
    whole = np.zeros(n, np.int64)
    return Rows(store, np.arange(n), whole, size, size - 1, np.full(n, -1, np.int64), weights)


def flat(order: Order, epoch_steps: range) -> list[int]:
    return [i for step in epoch_steps for one in order.step(step) for i in one]


@settings(max_examples=100, deadline=None)
@given(lengths=st.lists(st.integers(1, 64), min_size=1, max_size=80))
def test_packing_is_first_fit_decreasing(lengths: list[int]) -> None:
    bins: list[list[int]] = []
    for item in sorted(range(len(lengths)), key=lambda i: -lengths[i]):  # the definition, slowly
        for one in bins:
            if sum(lengths[i] for i in one) + lengths[item] <= 64:
                one.append(item)
                break
        else:
            bins.append([item])
    assert pack(lengths, 64) == bins


def test_packing_fills_real_mixes_and_is_fast() -> None:
    lengths = np.clip(np.random.default_rng(0).lognormal(5.5, 0.8, 50_000).astype(int), 8, 2048)
    started = time.process_time()
    bins = pack(lengths, 2048)
    assert time.process_time() - started < 5
    assert lengths.sum() / (len(bins) * 2048) > 0.98


@pytest.mark.parametrize("capacity", [2048, 8192])
def test_packing_fills_sequences_with_files_as_they_are(capacity: int) -> None:
    """Lengths nobody drew: the modules of Python's library, four characters a token, cut as rows are."""
    sizes = [path.stat().st_size for path in Path(sysconfig.get_path("stdlib")).glob("*.py")]
    sizes += [path.stat().st_size for path in Path(sysconfig.get_path("stdlib")).glob("*/*.py")]
    lengths = np.minimum(np.asarray([size // 4 for size in sizes if size >= 8]), capacity)
    bins = pack(lengths, capacity)
    assert len(lengths) > 300 and lengths.sum() / (len(bins) * capacity) > 0.98


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(2, 40), min_size=1, max_size=30),
    batch=st.integers(1, 7),
    world_size=st.integers(1, 4),
    micro=st.integers(1, 3),
    packing=st.booleans(),
)
def test_every_row_once_per_epoch_over_all_ranks(
    lengths: list[int], batch: int, world_size: int, micro: int, packing: bool
) -> None:
    order = make_order(
        rows_of(lengths), sequence_length=40, packing=packing, global_batch_size=batch, epochs=2, seed=3
    )
    per_epoch = order.steps_per_epoch
    assert order.steps == 2 * per_epoch
    for epoch in range(2):
        steps = range(epoch * per_epoch, (epoch + 1) * per_epoch)
        assert sorted(flat(order, steps)) == list(range(len(lengths)))
    for step in range(order.steps):
        bins = order.step(step)
        assert all(sum(lengths[i] for i in one) <= 40 for one in bins) and 1 <= len(bins) <= batch
        shares = [order.micro_batches(step, rank, world_size, micro) for rank in range(world_size)]
        assert len({len(share) for share in shares}) == 1
        assert all(len(one) <= micro for share in shares for one in share)
        assert sorted(b for share in shares for one in share for b in one) == sorted(bins)
        assert order.tokens(step) == sum(lengths[i] for one in bins for i in one)
        assert order.trained_tokens(step) == order.tokens(step) - sum(len(one) for one in bins)


def test_the_order_is_a_function_of_the_step_alone() -> None:
    rows = rows_of(list(range(2, 60)))
    options = {"sequence_length": 64, "packing": True, "global_batch_size": 4, "epochs": 3, "seed": 7}
    first = [make_order(rows, **options).step(i) for i in range(make_order(rows, **options).steps)]
    again = make_order(rows_of(list(range(2, 60))), **options)
    assert [again.step(i) for i in reversed(range(again.steps))][::-1] == first
    assert first[: again.steps_per_epoch] != first[again.steps_per_epoch : 2 * again.steps_per_epoch]
    other = make_order(rows, **(options | {"seed": 8}))
    assert [other.step(i) for i in range(other.steps)] != first


def test_fractions_of_epochs_and_steps_beyond_one_epoch() -> None:
    rows = rows_of([10] * 10)
    options = {"sequence_length": 10, "packing": False, "global_batch_size": 2}
    assert make_order(rows, epochs=0.5, **options).steps == 3  # of 5: never less than asked
    assert make_order(rows, epochs=1.2, **options).steps == 6
    assert make_order(rows, epochs=0.001, **options).steps == 1
    looped = make_order(rows, max_steps=12, **options)
    assert looped.steps == 12 and looped.epoch_of(11) == 2
    assert sorted(flat(looped, range(5, 10))) == list(range(10))
    assert make_order(rows, epochs=3, **options).step(7) == looped.step(7)


def test_weights_draw_parts_and_multiples_of_a_source() -> None:
    rows = rows_of([10] * 12, sources=[0] * 8 + [1] * 4, weights=(0.5, 2.0))
    order = make_order(rows, sequence_length=10, packing=False, global_batch_size=100, epochs=2)
    drawn = [flat(order, range(e, e + 1)) for e in range(2)]
    for rows_drawn in drawn:
        assert sum(i < 8 for i in rows_drawn) == 4
        assert sorted(i for i in rows_drawn if i >= 8) == [8, 8, 9, 9, 10, 10, 11, 11]
    assert sorted(i for d in drawn for i in d if i < 8) == list(range(8))  # both halves, over two epochs


def test_nothing_or_no_length_is_refused() -> None:
    rows = rows_of([10] * 3)
    with pytest.raises(DataError, match="no row"):
        make_order(
            rows.select(np.zeros(0, int)), sequence_length=10, packing=False, global_batch_size=1, epochs=1
        )
    with pytest.raises(DataError, match="epochs=None, max_steps=None"):
        make_order(rows, sequence_length=10, packing=False, global_batch_size=1)
    with pytest.raises(DataError, match="sequence_length is 9"):
        make_order(rows, sequence_length=9, packing=False, global_batch_size=1, epochs=1)
