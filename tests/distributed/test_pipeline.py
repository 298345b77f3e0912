"""TorchRec's train pipelines, on its own test models: the plain loop's result, or a refusal."""

from dataclasses import replace

import pytest
import torch
from torchrec.distributed.train_pipeline import train_pipelines

from stampede.optim import local_cowclip_tables
from support.parity import Case, Table
from support.programs import MIXED, MODELS, torchrecs_model, train_in_pipelines
from support.ranks import run_ranks
from support.unsharded import process_group

KINDS = ("TrainPipelineSparseDist", "TrainPipelineSparseDistLite")


@pytest.fixture(scope="module", params=[1, 2])
def results(request):
    if request.param == 1:
        return train_in_pipelines(KINDS)
    return run_ranks(request.param, train_in_pipelines, KINDS)[0]


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


@pytest.mark.slow
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


@pytest.fixture
def streams_on_cpu(monkeypatch):
    """Lets pipelines run that TorchRec wrote for GPUs only."""
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: torch.cpu.current_stream())


def one_collection():
    case = Case("table_wise", tables=(Table(40, 8), Table(50, 8)), arguments={"ratio": 1e-3})
    return torchrecs_model("TestSparseNN", case)


@pytest.mark.parametrize("start", [0, 3])
def test_semi_synchronous_pipelines_are_refused_at_their_first_late_lookup(streams_on_cpu, start):
    with process_group():
        model, inputs = one_collection()
        dense = torch.optim.SGD(model.module.dense.parameters(), lr=0.1)
        pipeline = train_pipelines.TrainPipelineSemiSync(
            model, dense, torch.device("cpu"), start_batch=start
        )
        batches = inputs(6)
        # Batch `start` is the first whose successor is looked up before its update.
        for _ in range(start + 1):
            pipeline.progress(batches)
        with pytest.raises(ValueError, match=r"looked up before the last update.*SparseDist"):
            pipeline.progress(batches)
        assert {int(tables.step_count) for tables in local_cowclip_tables(model)} == {start + 1}
