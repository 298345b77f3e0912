"""Weights that are learned get the exact gradient, as TorchRec's default sharders give them."""

import pytest
import torch

from support.gathering import tables_of
from support.parity import (
    Case,
    Holder,
    Table,
    build_collection,
    global_batch,
    local_batch,
    part_of,
    shard,
    sharded_loss,
)
from support.parity_cases import PLANS
from support.processors import case_of, reference, train_all
from support.ranks import process_group, run_ranks
from support.unsharded import PlainCollection

pytestmark = pytest.mark.slow

CASES = [case_of("row_wise", "all")] + [case_of(plan, "touched") for plan in PLANS]


@pytest.mark.cases(1)
@pytest.mark.parametrize("count, cases", [(1, CASES[:2]), (2, CASES), (4, CASES[1:4])])
def test_position_weights_and_tables_behind_them_follow_float64(count, cases):
    results = run_ranks(count, train_all, cases, count == 2)[0]
    for case, trained in zip(cases, results, strict=True):
        expected = reference(case)
        for name, grad in expected["grads"].items():
            assert float(grad.abs().max()) > 1e-3
            for found in trained:
                torch.testing.assert_close(
                    found["grads"][name].double(), grad, rtol=1e-4, atol=1e-5
                )
        for name, value in expected["end"].items():
            end = trained[0]["end"][name]
            torch.testing.assert_close(end.double(), value, rtol=1e-4, atol=1e-5)


def learnable(batch):
    """A batch whose weights of samples require gradients."""
    for _, _, weights, _ in batch.values():
        weights.requires_grad_()
    return batch


@process_group()
def learn_sample_weights(cases):
    """By case, the tables (on rank 0 only) and the gradient of this rank's weights of samples."""
    results = []
    for case in cases:
        model = shard(Holder(build_collection(case)), case)
        start, batch = tables_of(model), learnable(local_batch(case, 1))
        sharded_loss(case, model, batch).backward()
        results.append((start, [weights.grad for _, _, weights, _ in batch.values()]))
    return results


@pytest.mark.parametrize("count", [1, 2])
def test_weights_of_samples_follow_float64_where_they_are_not_sent(count):
    plans = ("data_parallel", "table_wise") if count == 1 else ("data_parallel",)
    tables = (Table(1 << 17, dim=8), Table(40, dim=8, features=2))
    cases = [Case(plan, tables, weighted=True, empty_rank=False) for plan in plans]
    ranks = run_ranks(count, learn_sample_weights, cases)
    for number, case in enumerate(cases):
        plain = PlainCollection(build_collection(case, "cpu"))
        with torch.no_grad():
            for name, values in ranks[0][number][0].items():
                plain.tables[name].copy_(values)
        size = case.batch // count
        for rank, results in enumerate(ranks):
            part = slice(rank * size, rank * size + size)
            batch = learnable(part_of(global_batch(case, 1), part))
            sharded_loss(case, plain, batch).backward()
            for (_, _, weights, _), found in zip(batch.values(), results[number][1], strict=True):
                torch.testing.assert_close(found, weights.grad, rtol=1e-4, atol=1e-5)
                assert float(found.abs().max()) > 0.01
