"""The same global batches on any number of ranks, every sample once, resumed anywhere."""

import gc
import json
import threading
import tracemalloc
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.stateful import Stateful

from stampede.data import DataError, GlobalBatches, Order, Samples, SyntheticClicks
from stampede.data.prepared.part import Shard, ShardedPart
from support.prepared import drawn_rows, shard_of

FIELDS = [f"C{i + 1}" for i in range(26)]
BAGS = ["C1", "C2", "M1", "M2"]


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


def reader(part, world_size=1, rank=0, batch_size=8, shuffle="global", fields=FIELDS[:2], **more):
    order = Order(part.rows, shuffle, 5, 16 if shuffle == "block" else 0, 4)
    return GlobalBatches(part, fields, batch_size, rank, world_size, order, **more)


def rows_of(batch):
    return batch.dense[: batch.samples, 0].long().tolist()


def global_batches(part, world_size, epoch=0, **more):
    """Sorted rows of each global batch, padding left out."""
    ranks = [
        list(reader(part, world_size, rank, **more).epoch(epoch)) for rank in range(world_size)
    ]
    assert len({len(batches) for batches in ranks}) == 1
    joined = []
    for batches in zip(*ranks, strict=True):
        assert len({len(batch.label) for batch in batches}) == 1
        rows = [row for batch in batches for row in rows_of(batch)]
        assert {batch.global_samples for batch in batches} == {len(rows)}
        joined.append(sorted(rows))
    return joined


# Last batches of 8 (full), 1, ranks-1 and ranks+1 samples, for 2 and 4 ranks.
@pytest.mark.parametrize("shuffle", ["global", "block", "none"])
@pytest.mark.parametrize("rows", [16, 17, 19, 21, 3])
def test_any_number_of_ranks_sees_the_same_batches(rows, shuffle):
    part = numbered(rows)
    alone = global_batches(part, 1, shuffle=shuffle)
    assert sorted(row for batch in alone for row in batch) == list(range(rows))
    assert global_batches(part, 2, shuffle=shuffle) == alone
    assert global_batches(part, 4, shuffle=shuffle) == alone


def test_synthetic_batches_do_not_depend_on_the_ranks():
    part = SyntheticClicks(scale=0.0005).dataset(2100, 100).train

    def batches(world_size):
        ranks = [
            GlobalBatches(part, FIELDS, 512, rank, world_size).epoch(0)
            for rank in range(world_size)
        ]
        return [
            torch.cat([batch.dense[: batch.samples] for batch in joined])
            for joined in zip(*ranks, strict=True)
        ]

    for two, one in zip(batches(2), batches(1), strict=True):
        assert torch.equal(two, one)


def test_memory_does_not_grow_with_synthetic_rows():
    peaks = []
    for rows in (20_000, 200_000):
        part = SyntheticClicks(scale=0.0005).dataset(rows, 100).train
        tracemalloc.start()
        for _ in GlobalBatches(part, FIELDS, 4096, 0, 1):
            pass
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.1 * peaks[0]


def test_epochs_differ_and_repeat():
    part = numbered(40)
    assert global_batches(part, 1, epoch=0) != global_batches(part, 1, epoch=1)
    assert global_batches(part, 2, epoch=1) == global_batches(part, 1, epoch=1)


@pytest.mark.parametrize(
    "part",
    [array_part(drawn_rows(9, single=26)), SyntheticClicks(scale=0.0005).dataset(9, 9).train],
)
def test_padding_has_no_ids_and_no_weight(part):
    batches = list(GlobalBatches(part, FIELDS, 8, rank=3, world_size=4))
    last = batches[-1]
    assert len(batches) == 2
    assert last.weight.tolist() == [0.0]
    assert last.sparse.values().numel() == 0
    assert last.sparse.lengths().tolist() == [0] * 26
    assert last.sparse.stride() == 1
    assert (last.global_samples, last.samples) == (1, 0)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 60),
    cuts=st.sets(st.integers(1, 59), max_size=4),
    single=st.integers(0, 3),
    multi=st.integers(0, 2),
    numbers=st.integers(0, 3),
    world_size=st.sampled_from([1, 2, 4]),
    shuffle=st.sampled_from(["global", "block", "none"]),
    half=st.booleans(),
    long=st.booleans(),
)
def test_batches_hold_what_the_arrays_hold(
    rows, cuts, single, multi, numbers, world_size, shuffle, half, long
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
        start = 0
        for batch in GlobalBatches(part, fields, 8, rank, world_size, order):
            count = min(8, rows - start)
            local = -(-count // world_size)
            wanted = order.rows_at(0, start, start + count)
            mine = np.sort(wanted[rank * local : (rank + 1) * local])
            assert batch.samples == len(mine)
            assert batch.global_weight == pytest.approx(arrays["weight"][wanted].sum())
            padding = local - len(mine)
            assert batch.dense.dtype == torch.float32 and batch.dense.shape == (local, numbers)
            np.testing.assert_array_equal(
                batch.dense[: len(mine)], arrays["numbers"][mine].astype(np.float32)
            )
            assert batch.label.tolist() == arrays["label"][mine].tolist() + [0] * padding
            assert batch.weight.tolist() == arrays["weight"][mine].tolist() + [0] * padding
            assert batch.sparse.stride() == local
            for i, field in enumerate(fields):
                bags = batch.sparse[field].to_dense()
                assert [bag.tolist() for bag in bags] == [
                    ids_of(arrays, i, row, single) for row in mine
                ] + [[]] * padding
            start += count


def ids_of(arrays, field, row, single):
    if field < single:
        return [arrays["ids"][row, field].item()]
    offsets = arrays[f"offsets_{field - single}"]
    return arrays[f"values_{field - single}"][offsets[row] : offsets[row + 1]].tolist()


@settings(max_examples=40, deadline=None)
@given(
    stop=st.integers(0, 11),
    before=st.sampled_from([1, 2, 4]),
    after=st.sampled_from([1, 2, 4]),
    shuffle=st.sampled_from(["global", "block", "none"]),
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


def test_the_state_is_that_of_the_consumer_and_a_break_goes_on():
    loader = reader(numbered(40), ahead=4)
    assert isinstance(loader, Stateful)
    whole = [rows_of(batch) for batch in reader(numbered(40)).epoch(0)]
    seen = []
    for batch in loader:
        seen.append(rows_of(batch))
        assert loader.state_dict()["samples"] == 8 * len(seen)
        if len(seen) == 2:
            break
    seen += [rows_of(batch) for batch in loader]
    assert seen == whole
    assert (loader.state_dict()["epoch"], loader.state_dict()["samples"]) == (1, 0)


def test_states_of_something_else_are_refused():
    loader = reader(numbered(40))
    next(iter(loader))
    state = loader.state_dict()
    with pytest.raises(DataError, match="40 rows, this one has 41"):
        reader(numbered(41)).load_state_dict(state)
    with pytest.raises(DataError, match=r"shuffle 'global'.*'none'"):
        reader(numbered(40), shuffle="none").load_state_dict(state)
    with pytest.raises(DataError, match="batches of 8, now they have 16"):
        reader(numbered(40), batch_size=16).load_state_dict(state)
    other = GlobalBatches(numbered(40), FIELDS[:2], 8, 0, 1, Order(40, "global", 6, 0, 4))
    with pytest.raises(DataError, match=r"seed 5 .* 6"):
        other.load_state_dict(state)
    for broken in ({}, {**state, "epoch": "x"}, {**state, "samples": 40}, {**state, "epoch": -1}):
        with pytest.raises(DataError, match="no state"):
            reader(numbered(40)).load_state_dict(broken)
    # At the beginning of an epoch any batch size will do.
    for _ in loader:
        pass
    larger = reader(numbered(40), batch_size=16)
    larger.load_state_dict(loader.state_dict())
    assert [sorted(rows_of(b)) for b in larger] == global_batches(
        numbered(40), 1, epoch=1, batch_size=16
    )


def readers_running():
    gc.collect()
    return [thread for thread in threading.enumerate() if "stampede-read" in thread.name]


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


def test_no_thread_outlives_its_use():
    loader = reader(numbered(80), ahead=2)
    for _ in loader:
        break
    assert not readers_running()

    def fail():
        for _ in loader:
            raise RuntimeError("training failed")

    with pytest.raises(RuntimeError):
        fail()
    assert not readers_running()
    whole = list(loader.epoch(0))
    assert len(whole) == 10 and not readers_running()


def test_a_batch_whose_weights_are_all_zero_has_no_weight():
    arrays = drawn_rows(16, single=2, weight=True)
    arrays["weight"][:8] = 0
    first, second = reader(array_part(arrays), shuffle="none")
    assert (first.global_weight, first.global_samples, first.samples) == (0, 8, 8)
    assert second.global_weight == arrays["weight"][8:].sum()


def test_ids_stand_under_their_fields():
    dataset = SyntheticClicks(scale=0.0005).dataset(100, 100)
    batch = next(GlobalBatches(dataset.train, list(dataset.vocabulary_sizes), 8, 1, 2).epoch(0))
    ids = dataset.train.read(torch.arange(4, 8)).ids
    for i, field in enumerate(dataset.vocabulary_sizes):
        assert batch.sparse[field].values().tolist() == ids[:, i].tolist()
    assert batch.true_probability.shape == (4,)


def test_moving_a_batch_keeps_everything():
    dataset = SyntheticClicks(scale=0.0005).dataset(100, 100)
    batch = next(GlobalBatches(dataset.train, FIELDS, 8, 0, 1).epoch(0))
    moved = batch.to(torch.device("cpu"))
    for name in ("dense", "label", "weight", "true_probability"):
        assert torch.equal(getattr(moved, name), getattr(batch, name))
    assert (moved.global_samples, moved.global_weight, moved.samples) == (8, 8.0, 8)


def test_rows_of_several_shards_in_any_order():
    arrays = drawn_rows(10, multi=1)
    part = array_part(arrays, [4, 7])
    rows = [5, 1, 1, 9, 0, 6, 6, 3, 8]
    read = part.read(torch.tensor(rows))
    np.testing.assert_array_equal(read.ids, arrays["ids"][rows])
    wanted = [arrays["values_0"][arrays["offsets_0"][r] : arrays["offsets_0"][r + 1]] for r in rows]
    assert read.bags[0].values.tolist() == np.concatenate(wanted).tolist()
    assert read.bags[0].lengths.tolist() == [len(bag) for bag in wanted]


def test_long_batches_ascend_in_stretches_and_hold_the_right_rows():
    rows = 100_000
    part = array_part(drawn_rows(rows, single=1, numbers=1), [20_000, 70_000])
    order = Order(rows, "global", 2)
    start = 0
    for batch in GlobalBatches(part, ["C1"], 80_000, 0, 1, order):
        stop = start + batch.samples
        assert rows_of(batch) != sorted(rows_of(batch)) or batch.samples <= 1 << 15
        assert sorted(rows_of(batch)) == sorted(order.rows_at(0, start, stop).tolist())
        start = stop
    assert start == rows


def test_a_batch_that_does_not_divide_is_refused():
    with pytest.raises(ValueError, match="not a multiple of 3"):
        reader(numbered(9), 3)


def test_an_order_of_another_part_is_refused():
    with pytest.raises(ValueError, match="order of 8 rows for a part of 9"):
        GlobalBatches(numbered(9), FIELDS[:2], 8, 0, 1, Order(8))
