"""The same global batches on any number of ranks, every sample once."""

import tracemalloc

import numpy as np
import pytest
import torch

from stampede.data import GlobalBatches, SyntheticClicks
from stampede.data.prepared.old import _ArrayPart

FIELDS = [f"C{i + 1}" for i in range(26)]


def array_part(rows):
    """A part whose rows are told apart by their number."""
    number = np.arange(rows)
    return _ArrayPart(
        np.repeat(number[:, None], 26, 1), number[:, None].astype(np.float32), number % 2
    )


def global_batches(part, world_size, batch_size=8, epoch=0):
    """Rows of each global batch, by rank in turn, padding left out."""
    ranks = [
        list(GlobalBatches(part, FIELDS, batch_size, rank, world_size, seed=5).epoch(epoch))
        for rank in range(world_size)
    ]
    assert len({len(batches) for batches in ranks}) == 1
    joined = []
    for batches in zip(*ranks, strict=True):
        assert len({len(batch.label) for batch in batches}) == 1
        rows = torch.cat([batch.dense[batch.weight > 0, 0] for batch in batches]).long().tolist()
        assert {batch.global_samples for batch in batches} == {len(rows)}
        joined.append(rows)
    return joined


# Last batches of 8 (full), 1, ranks-1 and ranks+1 samples, for 2 and 4 ranks.
@pytest.mark.parametrize("rows", [16, 17, 19, 21, 3])
def test_any_number_of_ranks_sees_the_same_batches(rows):
    part = array_part(rows)
    alone = global_batches(part, 1)
    assert sorted(row for batch in alone for row in batch) == list(range(rows))
    assert global_batches(part, 2) == alone
    assert global_batches(part, 4) == alone


def test_synthetic_batches_do_not_depend_on_the_ranks():
    part = SyntheticClicks(scale=0.0005).dataset(2100, 100).train

    def batches(world_size):
        ranks = [
            GlobalBatches(part, FIELDS, 512, rank, world_size).epoch(0)
            for rank in range(world_size)
        ]
        return [
            torch.cat([batch.dense[batch.weight > 0] for batch in joined])
            for joined in zip(*ranks, strict=True)
        ]

    for two, one in zip(batches(2), batches(1), strict=True):
        assert torch.equal(two, one)


def test_memory_does_not_grow_with_synthetic_rows():
    peaks = []
    for rows in (20_000, 200_000):
        part = SyntheticClicks(scale=0.0005).dataset(rows, 100).train
        tracemalloc.start()
        for _ in GlobalBatches(part, FIELDS, 4096, 0, 1).epoch(0):
            pass
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.1 * peaks[0]


def test_epochs_differ_and_repeat():
    part = array_part(40)
    assert global_batches(part, 1, epoch=0) != global_batches(part, 1, epoch=1)
    assert global_batches(part, 2, epoch=1) == global_batches(part, 1, epoch=1)


@pytest.mark.parametrize("part", [array_part(9), SyntheticClicks(scale=0.0005).dataset(9, 9).train])
def test_padding_has_no_ids_and_no_weight(part):
    batches = list(GlobalBatches(part, FIELDS, 8, rank=3, world_size=4).epoch(0))
    last = batches[-1]
    assert len(batches) == 2
    assert last.weight.tolist() == [0.0]
    assert last.sparse.values().numel() == 0
    assert last.sparse.lengths().tolist() == [0] * 26
    assert last.sparse.stride() == 1
    assert last.global_samples == 1


def test_ids_stand_under_their_fields():
    dataset = SyntheticClicks(scale=0.0005).dataset(100, 100)
    batch = next(GlobalBatches(dataset.train, list(dataset.vocabulary_sizes), 8, 1, 2).epoch(0))
    ids = dataset.train.read(np.arange(4, 8)).ids
    for i, field in enumerate(dataset.vocabulary_sizes):
        assert batch.sparse[field].values().tolist() == ids[:, i].tolist()
    assert batch.true_probability.shape == (4,)


def test_moving_a_batch_keeps_everything():
    dataset = SyntheticClicks(scale=0.0005).dataset(100, 100)
    batch = next(GlobalBatches(dataset.train, FIELDS, 8, 0, 1).epoch(0))
    moved = batch.to(torch.device("cpu"))
    for name in ("dense", "label", "weight", "true_probability"):
        assert torch.equal(getattr(moved, name), getattr(batch, name))
    assert moved.global_samples == 8


def test_a_batch_that_does_not_divide_is_refused():
    with pytest.raises(ValueError, match="not a multiple of 3"):
        GlobalBatches(array_part(9), FIELDS, 8, 0, 3)
