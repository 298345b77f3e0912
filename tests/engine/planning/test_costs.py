"""Costs of a plan made by hand, and how lookups spread over the rows of a table."""

import numpy as np
import pytest
import torch

from stampede.data import SyntheticClicks
from stampede.data.samples import sampled_rows
from stampede.engine.planning.dry_run import plan_costs
from stampede.engine.planning.tables import sampled, zipf
from stampede.engine.planning.workload import PlacedShard
from support.planning import planned_config, work_of

# 4 ranks, 16 samples of each; 12 columns; ids are int32.
RANKS, BATCH = 4, 64
LOCAL = BATCH // RANKS
TABLES = ["data.tables={a: 1000, b: 800, c: 12}", "data.zipf=null", "data.numbers=3"]
SHARDS = [
    PlacedShard("t_a", "table_wise", 1, 0, 1000, 0, 12),
    # By rows, on two ranks.
    *(PlacedShard("t_b", "row_wise", rank, 400 * rank, 400, 0, 12) for rank in (0, 1)),
    PlacedShard("t_b", "row_wise", 2, 800, 0, 0, 12),
    PlacedShard("t_b", "row_wise", 3, 800, 0, 0, 12),
    *(PlacedShard("t_c", "data_parallel", rank, 0, 12, 0, 12) for rank in range(4)),
]


def found(*overrides, shards=SHARDS):
    config = planned_config(*TABLES, *overrides, world_size=RANKS, batch_size=BATCH)
    work = work_of(config, RANKS)
    return work, *plan_costs(work, shards)


def test_weights_states_and_lookups():
    work, memory, lookups = found()
    inputs = 3 * 10 + 3
    # Weights and biases of three layers, the last layer's weights, the numbers' weights, the bias.
    dense = inputs * 400 + 400 + 2 * (400 * 400 + 400) + 400 + 3 + 1
    rows = [400 + 12, 1000 + 400 + 12, 12, 12]
    assert memory["weights"].tolist() == [4 * (12 * n + dense) for n in rows]
    # Two moments of 12 columns and the number of a step.
    states = [n * (2 * 12 * 4 + 4) + 2 * 4 * dense for n in rows]
    assert memory["optimizer_state"].tolist() == states
    # t_a on rank 1, half of t_b on ranks 0 and 1, the copies of t_c a rank's own samples.
    assert lookups.tolist() == [BATCH / 2 + LOCAL, BATCH * 3 / 2 + LOCAL, LOCAL, LOCAL]
    # Ids that are frequent weigh on the first rows.
    skewed = found("data.zipf=1.2")[2]
    assert skewed[0] > 1.5 * lookups[0]
    assert skewed.sum() == pytest.approx(lookups.sum())
    larger = found("train.batch_size=128")[1]["activations"]
    assert (larger > memory["activations"]).all()
    # An L2 term that may be clipped itself needs norms of all rows.
    assert not any(states.settings.needs_all_rows for states in work.states.values())
    whole = found("optim.embedding.l2=1", "optim.embedding.clip.ratio=0.01")[1]
    grown = whole["activations"] - memory["activations"]
    assert grown[1] == pytest.approx(rows[1] * 3 * 4, rel=0.05)


def test_every_part_of_a_row_looks_up_every_id():
    halves = [
        PlacedShard("t_a", "column_wise", rank, 0, 1000, 4 * part, 4)
        for part, rank in enumerate((2, 0, 2))
    ]
    assert found(shards=halves)[2].tolist() == [BATCH, 0, 2 * BATCH, 0]


def test_frequencies_by_zipf_and_by_a_sample():
    assert [zipf(8, 0.0)(row) for row in (0, 2, 8)] == [0.0, 0.25, 1.0]
    dataset = SyntheticClicks(scale=0.0001, zipf=1.3).dataset(20_000, 100)
    size = dataset.vocabulary_sizes["C3"]
    ids = dataset.train.read(torch.arange(20_000)).ids[:, 2].numpy()
    for row in (0, 1, 10, 100, size):
        assert zipf(size, 1.3)(row) == pytest.approx((ids < row).mean(), abs=0.015)
    known = sampled(np.array([0, 0, 1, 5]))
    assert [known(row) for row in (0, 1, 5, 6)] == [0.0, 0.5, 0.75, 1.0]
    # Of a sample that is spread over the part.
    assert np.array_equal(sampled_rows(300), np.arange(300))
    rows = sampled_rows(10**9)
    assert len(set(rows.tolist())) == len(rows) == 64 * 1024
    assert rows[0] == 0 and rows[-1] == 10**9 - 1
