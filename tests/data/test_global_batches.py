"""Global batches: the same on any number of ranks, resumed anywhere, and read ahead."""

import gc
import json
import multiprocessing
import threading
import time
from contextlib import nullcontext
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stampede.data import DataError, GlobalBatches, Order, Samples, SyntheticClicks, global_batches
from stampede.data import parallel as helpers
from stampede.data.parallel import run_tasks
from stampede.data.prepared import reader as gathering
from stampede.data.prepared.reader import Shard, ShardedPart
from stampede.engine.job.threads import using_threads
from support.prepared import drawn_rows, shard_of
from support.ranks import run_ranks
from support.waiting import HANG

FIELDS = [f"C{i + 1}" for i in range(26)]


def array_part(arrays, cuts=()):
    """A part in memory, in shards that end at the cuts."""
    edges = [0, *cuts, len(arrays["label"])]
    return ShardedPart(
        tuple(
            Shard(
                stop - start,
                {k: torch.from_numpy(a.copy()) for k, a in shard_of(arrays, start, stop).items()},
            )
            for start, stop in pairwise(edges)
        )
    )


def numbered(rows, **more):
    """A part whose rows are told apart by their first number."""
    return array_part(drawn_rows(rows, single=2, **more))


def reader(
    part, world_size=1, rank=0, batch_size=8, fields=FIELDS[:2],
    shuffle="global", seed=5, window=16, **more,
):  # fmt: skip
    order = Order(part.rows, shuffle, seed, window, 4)
    return GlobalBatches(part, fields, batch_size, rank, world_size, order, **more)


def rows_of(batch):
    return batch.dense[: batch.samples, 0].long().tolist()


# Tiles of two samples; of one, some of them padding; all padding but one.
@pytest.mark.parametrize("rows", [16, 19, 17])
def test_tiles_hold_the_same_samples_in_the_same_order_on_any_ranks(rows):
    def tiles(world_size):
        ranks = [
            reader(numbered(rows, weight=True), world_size, rank, tiles=4)
            for rank in range(world_size)
        ]
        found = []
        for batches in zip(*ranks, strict=True):
            assert {batch.tiles for batch in batches} == {4 // world_size}
            assert len({batch.global_weight for batch in batches}) == 1
            found.append(
                [part.tolist() for b in batches for part in b.dense.chunk(b.tiles)]
                + [batches[0].global_weight]
            )
        return found

    assert tiles(4) == tiles(2) == tiles(1)


def test_numbers_are_aligned_wherever_they_were_read_to():
    # Otherwise the bits of an evaluation would depend on what else a process has in memory.
    part = SyntheticClicks(scale=0.0005).dataset(200, 9).train
    held = [batch.dense for batch in GlobalBatches(part, FIELDS, 7, rank=0, world_size=1)]
    assert {dense.data_ptr() % 64 for dense in held} == {0}


def test_padding_of_synthetic_clicks_has_no_ids_and_no_weight():
    part = SyntheticClicks(scale=0.0005).dataset(9, 9).train
    first, last = GlobalBatches(part, FIELDS, 8, rank=3, world_size=4)
    assert (first.samples, last.samples, last.global_samples) == (2, 0, 1)
    assert last.weight.tolist() == last.true_probability.tolist() == [0.0]
    assert last.sparse.values().numel() == 0
    assert last.sparse.lengths().tolist() == [0] * 26


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 60),
    cuts=st.sets(st.integers(1, 59), max_size=4),
    single=st.integers(0, 3),
    multi=st.integers(0, 2),
    numbers=st.integers(0, 3),
    world_size=st.sampled_from([1, 2, 4]),
    shuffle=st.sampled_from(["global", "block", "rotate", "none"]),
    half=st.booleans(),
    long=st.booleans(),
    threads=st.sampled_from([1, 2]),
)
def test_batches_hold_what_the_arrays_hold_on_any_number_of_ranks(
    rows, cuts, single, multi, numbers, world_size, shuffle, half, long, threads
):
    """Against a loop over single samples."""
    if single + multi == 0:
        single = 1
    arrays = drawn_rows(rows, single, numbers, multi, weight=True)
    if half:
        arrays["numbers"] = arrays["numbers"].astype(np.float16)
    if long:
        for name in arrays:
            if name == "ids" or name.startswith("values"):
                arrays[name] = arrays[name].astype(np.int64) + 2**40
    part = array_part(arrays, sorted(cut for cut in cuts if cut < rows))
    fields = [f"C{i}" for i in range(single)] + [f"M{i}" for i in range(multi)]
    order = Order(rows, shuffle, 3, 8 if shuffle == "block" else 0, 4)
    for rank in range(world_size):
        with using_threads(threads):
            batches = list(GlobalBatches(part, fields, 8, rank, world_size, order))
        start = 0
        for batch in batches:
            count = min(8, rows - start)
            local = -(-count // world_size)
            wanted = order.rows_at(0, start, start + count)
            mine = np.sort(wanted[rank * local : (rank + 1) * local])
            assert (batch.samples, batch.global_samples) == (len(mine), count)
            assert batch.global_weight == pytest.approx(arrays["weight"][wanted].sum())
            padding = local - len(mine)
            assert batch.dense.dtype == torch.float32 and batch.dense.shape == (local, numbers)
            np.testing.assert_array_equal(
                batch.dense[: len(mine)], arrays["numbers"][mine].astype(np.float32)
            )
            assert batch.label.tolist() == arrays["label"][mine].tolist() + [0] * padding
            assert batch.weight.tolist() == arrays["weight"][mine].tolist() + [0] * padding
            assert batch.sparse.stride() == local
            # TorchRec would count them, which on a GPU is a wait.
            told = batch.sparse.length_per_key_or_none()
            assert told == batch.sparse.lengths().view(len(fields), -1).sum(1).tolist()
            for i, field in enumerate(fields):
                bags = batch.sparse[field].to_dense()
                assert [bag.tolist() for bag in bags] == [
                    ids_of(arrays, i, row, single) for row in mine
                ] + [[]] * padding
            start += count
        assert start == rows


def ids_of(arrays, field, row, single):
    if field < single:
        return [arrays["ids"][row, field].item()]
    offsets = arrays[f"offsets_{field - single}"]
    return arrays[f"values_{field - single}"][offsets[row] : offsets[row + 1]].tolist()


@pytest.mark.parametrize("threads", [1, 2])
def test_long_batches_ascend_in_stretches_and_hold_the_right_rows(threads):
    rows = 100_000
    part = array_part(drawn_rows(rows, single=1, numbers=1), [20_000, 70_000])
    order = Order(rows, "global", 2)
    start = 0
    with using_threads(threads):
        batches = list(GlobalBatches(part, ["C1"], 80_000, 0, 1, order))
    for batch in batches:
        stop = start + batch.samples
        assert rows_of(batch) != sorted(rows_of(batch)) or batch.samples <= 1 << 15
        assert sorted(rows_of(batch)) == sorted(order.rows_at(0, start, stop).tolist())
        start = stop
    assert start == rows


@pytest.mark.parametrize("shuffle", ["global", "block", "rotate", "none"])
def test_small_batches_have_the_rows_of_the_order(monkeypatch, shuffle):
    """Also those across a stretch's end, from the middle of an epoch, and in the next one."""
    monkeypatch.setattr(global_batches, "_SORTED", 64)
    batches = reader(numbered(300), batch_size=6, shuffle=shuffle)
    order = Order(300, shuffle, 5, 16, 4)
    batches.load_state_dict({**batches.state_dict(), "epoch": 1, "samples": 60})
    for epoch, first in ((1, 60), (2, 0)):
        for start, batch in zip(range(first, 300, 6), batches, strict=True):
            expected = sorted(order.rows_at(epoch, start, min(start + 6, 300)))
            assert batch.rows.tolist() == expected and rows_of(batch) == expected


def test_batches_that_do_not_divide_and_an_order_of_another_part_are_refused():
    with pytest.raises(ValueError, match="not a multiple of 3"):
        reader(numbered(9), 3)
    with pytest.raises(ValueError, match="4 tiles are not a multiple of 8 ranks"):
        reader(numbered(16), 8, tiles=4)
    with pytest.raises(ValueError, match="order of 8 rows for a part of 9"):
        GlobalBatches(numbered(9), FIELDS[:2], 8, 0, 1, Order(8))


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_sum_of_the_weights_is_exact(world_size):
    arrays = drawn_rows(3000, single=1, weight=True)
    arrays["weight"] = np.random.default_rng(0).random(3000, np.float32) * 1e3
    (batch,) = GlobalBatches(array_part(arrays), ["C1"], 4096, 0, world_size)
    assert batch.global_weight == pytest.approx(arrays["weight"].sum(dtype=np.float64), rel=1e-12)


def test_gathering_as_on_a_device(monkeypatch):
    """The path of GPUs, taken by the CPU."""
    part = array_part(drawn_rows(40, multi=2, weight=True), [7, 30])
    rows = torch.tensor([31, 2, 2, 8, 39, 0, 29])
    wanted = part.read(rows)
    monkeypatch.setattr(gathering, "_CPU", torch.device("meta"))
    monkeypatch.setattr(gathering, "run_tasks", None)
    for placed in (part, part.resident(torch.device("cpu"))):
        found = placed.read(rows)
        for name in ("ids", "dense", "label", "weight"):
            assert torch.equal(getattr(found, name), getattr(wanted, name))
        for mine, theirs in zip(found.bags, wanted.bags, strict=True):
            assert torch.equal(mine.values, theirs.values)
            assert torch.equal(mine.lengths, theirs.lengths)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("shuffle", ["global", "block", "rotate", "none"])
@pytest.mark.parametrize("where", ["pinned", "resident"])
def test_batches_on_a_gpu(where, shuffle):
    gpu = torch.device("cuda", 0)
    part = array_part(drawn_rows(333, single=2, multi=2, weight=True), [100, 200])
    fields = ["C1", "C2", "M1", "M2"]
    how = {"batch_size": 64, "shuffle": shuffle, "fields": fields}
    if where == "pinned":
        found = reader(part, ahead=2, pin=gpu, **how)
    else:
        found = reader(part.resident(gpu), **how)
    for batch, other in zip(found, reader(part, **how), strict=True):
        assert batch.label.is_cuda or batch.label.is_pinned()
        moved = batch.to(gpu, non_blocking=True).to(torch.device("cpu"))
        assert torch.equal(moved.sparse.values(), other.sparse.values())
        assert torch.equal(moved.sparse.lengths(), other.sparse.lengths())
        for name in ("dense", "label", "weight"):
            assert torch.equal(getattr(moved, name), getattr(other, name))
        assert batch.global_weight == pytest.approx(other.global_weight)


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(
    stop=st.integers(0, 11),
    before=st.sampled_from([1, 2, 4]),
    after=st.sampled_from([1, 2, 4]),
    shuffle=st.sampled_from(["global", "block", "rotate", "none"]),
    ahead=st.sampled_from([0, 3]),
)
def test_resumed_anywhere_on_any_number_of_ranks(stop, before, after, shuffle, ahead):
    """30 rows are 4 batches an epoch; 3 epochs of them."""
    part = numbered(30)

    def run(loader, epochs):
        return [sorted(rows_of(batch)) for _ in range(epochs) for batch in loader]

    whole = [run(reader(part, after, rank, shuffle=shuffle), 3) for rank in range(after)]
    states = []
    for rank in range(before):
        loader = reader(part, before, rank, shuffle=shuffle, ahead=ahead)
        for seen in range(stop):
            if seen % 4 == 0:
                epoch = iter(loader)
            next(epoch)
        states.append(json.dumps(loader.state_dict()))
    assert len(set(states)) == 1
    for rank in range(after):
        loader = reader(part, after, rank, shuffle=shuffle, ahead=ahead)
        loader.load_state_dict(json.loads(states[0]))
        assert run(loader, 3 - stop // 4) == whole[rank][stop:]


def test_states_of_other_data_or_orders_are_refused():
    loader = reader(numbered(40))
    next(iter(loader))
    state = loader.state_dict()
    for other, words in (
        (reader(numbered(41)), "rows=40, now it is 41"),
        (reader(numbered(40), batch_size=16), "batch_size=8, now it is 16"),
        (reader(numbered(40), shuffle="none"), r"shuffle='global'.*'none'"),
        (reader(numbered(40), seed=6), r"seed=5,.* 6"),
    ):
        with pytest.raises(DataError, match=words):
            other.load_state_dict(state)
    for shuffle in ("none", "global", "block"):
        one, other = (reader(numbered(40), shuffle=shuffle, window=rows) for rows in (8, 16))
        # A window without a meaning may be another one.
        is_refused = pytest.raises(DataError, match="window_rows=8, now")
        with is_refused if shuffle == "block" else nullcontext():
            other.load_state_dict(one.state_dict())
    # At the beginning of an epoch the batch size may change.
    for _ in loader:
        pass
    larger = reader(numbered(40), batch_size=16)
    larger.load_state_dict(loader.state_dict())
    expected = reader(numbered(40), batch_size=16).epoch(1)
    assert [rows_of(batch) for batch in larger] == [rows_of(batch) for batch in expected]


@pytest.mark.parametrize("ahead", [0, 3])
@pytest.mark.parametrize("superseded_by", ["iter", "epoch", "load_state_dict"])
def test_only_the_newest_iterator_moves_the_position(ahead, superseded_by):
    loader = reader(numbered(40), ahead=ahead)
    old = iter(loader)
    next(old)
    new = {
        "iter": lambda: iter(loader),
        "epoch": lambda: loader.epoch(0),
        "load_state_dict": lambda: loader.load_state_dict(loader.state_dict()),
    }[superseded_by]()
    position = loader.state_dict()
    with pytest.raises(RuntimeError, match="use the newest one"):
        next(old)
    assert loader.state_dict() == position
    left = [rows_of(batch) for batch in (loader if new is None else new)]
    whole = [rows_of(batch) for batch in reader(numbered(40)).epoch(0)]
    assert left == whole[0 if superseded_by == "epoch" else 1 :]


@pytest.fixture
def two_threads():
    with using_threads(2):
        yield


def readers_running():
    gc.collect()
    return [thread for thread in threading.enumerate() if "stampede-ahead" in thread.name]


class _Broken:
    """Fails at a row, with an error of its own."""

    rows, device = 64, torch.device("cpu")

    def read(self, rows):
        if 40 in rows.tolist():
            raise DataError("row 40 is lost")
        return Samples(rows[:, None], torch.zeros(len(rows), 1), rows % 2)

    def weight(self, rows):
        return None


@pytest.mark.parametrize("ahead", [0, 3])
def test_errors_of_reading_reach_the_consumer_as_they_are(ahead):
    loader = GlobalBatches(_Broken(), ["C1"], 8, 0, 1, ahead=ahead)
    seen = []
    with pytest.raises(DataError, match=r"^row 40 is lost$"):
        for batch in loader:
            seen.append(batch)
    assert len(seen) == 5
    assert loader.state_dict()["samples"] == 40
    assert not readers_running()


@pytest.mark.slow
def test_no_thread_outlives_its_use():
    loader = reader(numbered(80), ahead=2)
    for _ in loader:
        assert len(readers_running()) == 1
        break
    assert not readers_running()
    assert len(list(loader.epoch(0))) == 10 and not readers_running()


def meet():
    """Two tasks that wait for each other: they end only in two threads."""
    barrier = threading.Barrier(2)
    run_tasks(lambda _: barrier.wait(timeout=HANG), range(2))


@pytest.mark.parametrize("where", ["helper", "caller"])
def test_errors_of_tasks_end_them_all(two_threads, where):
    barrier = threading.Barrier(2)
    done = []

    def task(number):
        if number < 2:
            barrier.wait(timeout=HANG)
            if (threading.current_thread() is threading.main_thread()) == (where == "caller"):
                raise DataError("a shard is lost")
            time.sleep(0.05)
        done.append(number)

    with pytest.raises(DataError, match=r"^a shard is lost$"):
        run_tasks(task, range(100))
    assert len(done) < 99
    # No task is still running.
    after = list(done)
    time.sleep(0.1)
    assert done == after


def test_busy_helpers_are_not_waited_for(two_threads):
    release = threading.Event()
    busy = [helpers._helpers().submit(release.wait, HANG) for _ in range(helpers._MOST_CORES)]
    done = []
    try:
        run_tasks(done.append, range(4))
        assert not any(future.done() for future in busy)
    finally:
        release.set()
    assert done == [0, 1, 2, 3]


def meet_in_a_fork():
    with using_threads(2):
        meet()
        child = multiprocessing.get_context("fork").Process(target=meet, daemon=True)
        child.start()
        child.join(HANG)
        code = child.exitcode
        child.kill()
        return code


def test_a_fork_has_helpers_of_its_own():
    # In a process of its own: a fork of this one may wait for locks of its other threads for ever.
    assert run_ranks(1, meet_in_a_fork) == [0]
