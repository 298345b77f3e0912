"""The same global batches on any number of ranks, every sample once."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stampede.data import GlobalBatches, Order, SyntheticClicks
from stampede.data.prepared import reader as gathering
from support.batches import FIELDS, array_part, numbered, reader, rows_of
from support.prepared import drawn_rows
from support.threads import torch_threads


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
        with torch_threads(threads):
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
    with torch_threads(threads):
        batches = list(GlobalBatches(part, ["C1"], 80_000, 0, 1, order))
    for batch in batches:
        stop = start + batch.samples
        assert rows_of(batch) != sorted(rows_of(batch)) or batch.samples <= 1 << 15
        assert sorted(rows_of(batch)) == sorted(order.rows_at(0, start, stop).tolist())
        start = stop
    assert start == rows


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
