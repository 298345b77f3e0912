"""Initial values depend on (seed, table, row, column) only."""

import tracemalloc

import pytest
import torch

from stampede.optim import TableInit
from stampede.optim.table_init import BLOCK_ROWS, fill_shard_


def shard(rows, columns=12, init=TableInit(std=0.01), row_offset=0, column_offset=0, table="t"):
    made = torch.full((rows, columns), float("nan"))
    place = {"table": table, "row_offset": row_offset, "column_offset": column_offset}
    fill_shard_(made, init, dim=12, low=-0.5, high=0.5, **place)
    return made


@pytest.mark.parametrize("init", [TableInit(std=0.01), TableInit(), TableInit(0.01, columns=10)])
def test_shards_are_parts_of_the_whole(init):
    whole = shard(5000, init=init)
    for first, last in ((0, 1), (0, 1024), (1000, 3000), (1023, 1025), (4999, 5000)):
        part = shard(last - first, init=init, row_offset=first)
        assert torch.equal(part, whole[first:last])
    assert torch.equal(shard(50, 4, init, 7, 8), whole[7:57, 8:12])


def test_several_threads_draw_what_one_does(monkeypatch):
    rows = 3 * 64 * BLOCK_ROWS + 5
    parts = {first: shard(100, row_offset=first) for first in (0, 64 * BLOCK_ROWS - 8, rows - 100)}
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    whole = shard(rows)
    assert whole.isfinite().all()
    for first, part in parts.items():
        assert torch.equal(whole[first : first + 100], part)


def test_values_are_of_their_distribution_seed_and_table():
    normal = shard(20_000, init=TableInit(0.01, columns=10))
    assert normal[:, 10:].abs().max() == 0
    assert normal[:, :10].std().item() == pytest.approx(0.01, rel=0.02)
    assert normal[:, :10].mean().abs() < 1e-4
    uniform = shard(20_000, init=TableInit())
    assert -0.5 <= uniform.min() < -0.49 and 0.49 < uniform.max() < 0.5
    for other in (shard(10, table="u"), shard(10, init=TableInit(0.01, seed=1))):
        assert not torch.equal(shard(10), other)


def test_a_shard_of_a_huge_table_costs_only_its_rows():
    tracemalloc.start()
    made = shard(100, row_offset=5_000_000_000)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # Two blocks at most, whatever the rows before and behind.
    assert peak < 4 * BLOCK_ROWS * 12 * 4
    assert made.std().item() == pytest.approx(0.01, rel=0.1)
