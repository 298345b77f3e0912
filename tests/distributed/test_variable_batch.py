"""Features of different batch sizes train as the whole batch does, in plain float64 PyTorch."""

import pytest
import torch
from torchrec import KeyedJaggedTensor

from support.parity import TOLERANCE, Case, Holder, Table, build_collection, deviation, shard
from support.parity_cases import SUMS
from support.ranks import process_group, run_ranks
from support.variable_batch import as_batch, drawn, train_with_all_bags, train_with_shared_bags

pytestmark = pytest.mark.slow

MEANS = (Table(40, mean=True), Table(23, features=2, mean=True), Table(60, mean=True))
CASES = [
    Case(plan, tables, arguments={"rows": rows}, weighted=weighted, way=None)
    for plan, tables, weighted in (
        ("table_wise", Case.tables, False),
        ("table_wise", SUMS, True),
        ("row_wise", SUMS, True),
        ("row_wise", MEANS, False),
        ("column_wise", Case.tables, True),
        ("data_parallel", SUMS, False),
        (("table_wise", "row_wise", "column_wise", "grid_shard"), SUMS, False),
    )
    for rows in ("all", "touched")
]


@pytest.mark.parametrize("count", [1, 2])
def test_shared_bags_train_as_those_of_all_samples(count):
    ranks = run_ranks(count, train_with_shared_bags, CASES)
    for case, *of_ranks in zip(CASES, *ranks, strict=True):
        start, found, _ = of_ranks[0]
        expected, once = (train_with_all_bags(case, start, forced) for forced in (None, 1))
        losses = torch.tensor([losses for _, _, losses in of_ranks]).mean(0)
        torch.testing.assert_close(losses, torch.tensor(expected.losses), rtol=1e-4, atol=1e-5)
        assert deviation(start, found, expected) < TOLERANCE
        # It would be noticed if a bag counted once for all its samples.
        assert deviation(start, found, once) > 100 * TOLERANCE


def test_bags_that_no_sample_is_told_of_are_refused():
    case = CASES[0]
    with process_group():
        model = shard(Holder(build_collection(case)), case)
        batch = as_batch(case, drawn(case, 0), slice(None), is_whole=False)
        alone = KeyedJaggedTensor(
            batch.keys(),
            batch.values(),
            lengths=batch.lengths(),
            stride_per_key_per_rank=batch.stride_per_key_per_rank(),
        )
        with pytest.raises(ValueError, match="feature 'f0_0' has a batch size of its own"):
            model(alone)
