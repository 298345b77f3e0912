"""TorchRec's train pipelines, weights that are learned and raw ids, on any number of processes."""

from dataclasses import replace

import pytest
import torch

from support import managed_collision
from support.parity import Case, Table, build_collection, sharded_loss
from support.parity_cases import PLANS
from support.processors import case_of, learn_sample_weights, learnable, reference, train_all
from support.programs import MIXED, MODELS, train_in_pipelines
from support.ranks import run_ranks
from support.unsharded import PlainCollection

pytestmark = pytest.mark.slow

KINDS = ("TrainPipelineSparseDist", "TrainPipelineSparseDistLite")


@pytest.fixture(scope="module", params=[1, 2])
def results(request):
    if request.param == 1:
        return train_in_pipelines(KINDS)
    return run_ranks(request.param, train_in_pipelines, KINDS)[0]


@pytest.mark.parametrize("name", MODELS)
def test_pipelines_give_the_weights_of_the_plain_loop(results, name):
    assert_equal_weights(results[name], KINDS)


def assert_equal_weights(found, kinds):
    tables, dense, steps = found[None]
    assert steps == 6
    for kind in kinds:
        other_tables, other_dense, other_steps = found[kind]
        assert other_steps == steps
        for whole, other in ((tables, other_tables), (dense, other_dense)):
            assert whole.keys() == other.keys()
            assert all(torch.equal(whole[name], other[name]) for name in whole)


@pytest.mark.parametrize(
    "count, kind, plan",
    [
        (1, "TrainPipelinePT2", "table_wise"),
        pytest.param(1, "compiled", "table_wise", marks=pytest.mark.soak),
        pytest.param(2, "TrainPipelinePT2", "row_wise", marks=pytest.mark.soak),
    ],
)
def test_compiled_models_give_the_weights_of_the_plain_loop(count, kind, plan):
    name = "TestSparseNN"
    case = replace(MIXED, plan=plan, tables=MIXED.tables[:2])
    found = run_ranks(count, train_in_pipelines, [kind], [name], case)[0][name]
    assert_equal_weights(found, [kind])


CASES = [case_of("row_wise", "all")] + [case_of(plan, "touched") for plan in PLANS]


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
            batch = learnable(case, slice(rank * size, rank * size + size))
            sharded_loss(case, plain, batch).backward()
            for (_, _, weights, _), found in zip(batch.values(), results[number][1], strict=True):
                torch.testing.assert_close(found, weights.grad, rtol=1e-4, atol=1e-5)
                assert float(found.abs().max()) > 0.01


# Small tables evict in every step, with rows that wait for their steps; where each rank's part is
# of 65,536 rows, they wait without being told.
RUNS = [
    ("waiting", (True, 64, "all", False)),
    ("waiting", (False, 64, "touched", False)),
    ("waiting", (True, 64, "touched", True)),
    ("waiting", (False, 64, "all", True)),
    (None, (True, 1 << 17, "all", False)),
    (None, (False, 1 << 17, "touched", False)),
]


@pytest.mark.parametrize("count, runs", [(1, RUNS[:2]), (2, RUNS), (4, RUNS[1:3])])
def test_every_id_has_one_row_and_rows_follow_the_equations(count, runs):
    ranks = run_ranks(count, managed_collision.train_all, runs)
    for (_, (_, _, moved, _)), *found in zip(runs, *ranks, strict=True):
        assert all(one["mapped"] == found[0]["mapped"] for one in found)
        assert len(set(found[0]["mapped"]["feature_0"])) > 10
        assert all(one["deviation"] < 1e-4 for one in found)
        assert found[0]["waited"] == (moved == "all")
