"""Costs of shards made by hand."""

import pytest
import torch

from stampede.data.samples import sampled_rows
from support.planning import model_and_work_of, planned_config

# 4 ranks, 16 samples of each; 12 columns.
RANKS, BATCH = 4, 64
TABLES = ["data.tables={a: 1000, b: 800, c: 12}", "data.numbers=3"]
PARTS = {
    "table": ("t_a", "table_wise", (1000, 12)),
    "rows": ("t_b", "row_wise", (400, 12)),
    "columns": ("t_a", "column_wise", (1000, 4)),
    "copy": ("t_c", "data_parallel", (12, 12)),
}


def found(*overrides):
    config = planned_config(*TABLES, *overrides, world_size=RANKS, batch_size=BATCH)
    _, work = model_and_work_of(config, RANKS)
    return work, {name: work.shard_bytes(*shard) for name, shard in PARTS.items()}


def test_weights_states_and_what_a_step_takes():
    work, shards = found()
    inputs = 3 * 10 + 3
    # Weights and biases of three layers, the last layer's weights, the numbers' weights, the bias.
    dense = inputs * 400 + 400 + 2 * (400 * 400 + 400) + 400 + 3 + 1
    weights, mean, states, step = work.common_bytes()
    assert (weights, mean, states) == (4 * dense, 0, 2 * 4 * dense)
    # At least each layer's output of each sample, and the gradients.
    assert step > BATCH / RANKS * 3 * 400 * 4 + 4 * dense
    for name, rows, columns in (("table", 1000, 12), ("rows", 400, 12), ("columns", 1000, 4)):
        # Two moments and the number of a step.
        assert shards[name][:3].tolist() == [4 * rows * columns, 0, rows * (2 * columns * 4 + 4)]
    rows_of = {"table": BATCH, "rows": BATCH, "columns": BATCH, "copy": BATCH / RANKS}
    for name, rows in rows_of.items():
        columns = PARTS[name][2][1]
        # A looked-up row and its gradient; then, of each different row, weights and moments.
        assert shards[name][3] > rows * 2 * columns * 4 + min(rows, 12) * 3 * columns * 4
    assert found("train.batch_size=128")[1]["table"][3] == pytest.approx(2 * shards["table"][3])
    # An L2 term that may be clipped itself needs norms of all rows.
    whole = found("optim.embedding.l2=1", "optim.embedding.clip.ratio=0.01")[1]
    assert whole["table"][3] - shards["table"][3] == pytest.approx(1000 * 3 * 4, rel=0.05)
    assert work.table_bytes() == 1812 * (3 * 12 * 4 + 4)


def test_each_of_the_shards_that_split_rows_returns_sums_of_all_samples():
    def halves_beyond_whole(*overrides):
        work, shards = found(*overrides)
        return 2 * shards["rows"][3] - work.shard_bytes("t_b", "table_wise", (800, 12))[3]

    # The sums of the second half, with the lengths of their bags twice, and their gradients.
    assert halves_beyond_whole() == BATCH * (2 * 12 * 4 + 2 * 4)
    # Of a history each row is returned by the one shard that has it.
    assert halves_beyond_whole("data.ids_per_sample={b: 5}", "data.attention={b: a}") == 0


def test_a_sample_of_a_part_is_spread_over_it():
    assert sampled_rows(300).tolist() == list(range(300))
    rows = torch.from_numpy(sampled_rows(10**9))
    assert len(rows.unique()) == len(rows) == 64 * 1024
    assert rows[0] == 0 and rows[-1] == 10**9 - 1
