"""TorchRec's train pipelines, on its own test models: the plain loop's result."""

from dataclasses import replace

import pytest
import torch

from support.programs import MIXED, MODELS, train_in_pipelines
from support.ranks import run_ranks

KINDS = ("TrainPipelineSparseDist", "TrainPipelineSparseDistLite")


@pytest.fixture(scope="module")
def results():
    return run_ranks(2, train_in_pipelines, KINDS)[0]


@pytest.mark.slow
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


@pytest.mark.wide
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
