"""Programs on sharded tables that tests run in one process or in several."""

import contextlib

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch._dynamo.utils import counters
from torchrec import EmbeddingBagConfig, EmbeddingConfig
from torchrec.distributed.test_utils import test_model as theirs
from torchrec.distributed.train_pipeline import train_pipelines
from torchrec.distributed.train_pipeline.train_pipelines import TorchCompileConfig
from torchrec.optim.optimizers import in_backward_optimizer_filter

from support.gathering import tables_of
from support.parity import Case, Holder, Table, build_collection, everything, shard, train
from support.ranks import process_group
from support.torchrec_models import batch_of


@process_group()
def save_and_load(to_save, into, to_load, source):
    """Train each case of `to_save`, save it in the folder `into`, and take one more step.

    Then load each case of `to_load` from `source`, under its own plan, and take that step.

    Returns:
        By case saved or loaded, what it was at that time, and after the step.
    """
    saved = [_continued(case, f"{into}/{index}", dcp.save) for index, case in enumerate(to_save)]
    loaded = [_continued(case, f"{source}/{index}", dcp.load) for index, case in enumerate(to_load)]
    return saved, loaded


def _continued(case, folder, exchange):
    model = shard(Holder(build_collection(case)), case)
    # A model that is loaded into has been trained too, so that nothing is right by itself.
    train(case, model, range(1, 4) if exchange is dcp.save else [9])
    checkpoint = {"model": model.state_dict(), "optimizer": model.fused_optimizer.state_dict()}
    exchange(checkpoint, checkpoint_id=folder)
    if exchange is dcp.load:
        model.load_state_dict(checkpoint["model"])
        model.fused_optimizer.load_state_dict(checkpoint["optimizer"])
    then = everything(model)
    train(case, model, [4])
    return then, everything(model)


# TorchRec's test models, with the kinds of their first two and their last two tables.
MODELS = {
    "TestSparseNN": (EmbeddingBagConfig, EmbeddingBagConfig),
    "TestMixedEmbeddingSparseArch": (EmbeddingBagConfig, EmbeddingConfig),
}


# Their tables, of which the last two are weighted, or sequences.
MIXED = Case(
    ("table_wise", "row_wise", "column_wise", "data_parallel"),
    tables=tuple(Table(rows, 8) for rows in (40, 50, 60, 30)),
    arguments={"ratio": 1e-3},
)


@process_group()
def train_in_pipelines(kinds, models=tuple(MODELS), case=MIXED):
    """TorchRec's test models in a plain loop, as kind None, and in its train pipelines.

    Args:
        kinds: names of classes of `train_pipelines`; "compiled" is a plain loop.

    Returns:
        By model and kind: the tables (on rank 0 only), the dense weights, the number of steps.
    """
    return {
        name: {kind: _in_pipeline(name, kind, case) for kind in (None, *kinds)} for name in models
    }


def _in_pipeline(name, kind, case):
    model, batches = torchrecs_model(name, case)
    dense = dict(in_backward_optimizer_filter(model.named_parameters()))
    optimizer = torch.optim.SGD(dense.values(), lr=0.1)
    steps = 0
    if kind in (None, "compiled"):
        run = torch.compile(model, backend="aot_eager") if kind else model
        for batch in batches:
            optimizer.zero_grad()
            run(batch)[0].backward()
            optimizer.step()
            steps += 1
    else:
        is_compiled = kind == "TrainPipelinePT2"
        compiled = TorchCompileConfig(backend="aot_eager", compile_on_iter=1)
        configs = {"compile_configs": compiled} if is_compiled else {}
        pipeline = getattr(train_pipelines, kind)(model, optimizer, torch.device("cpu"), **configs)
        with contextlib.suppress(StopIteration):
            while True:
                pipeline.progress(batches)
                steps += 1
        assert is_compiled or len(pipeline._pipelined_modules) == 2
    if kind in ("compiled", "TrainPipelinePT2"):
        assert counters["stats"]["unique_graphs"] > 5
    weights = {name: parameter.detach().clone() for name, parameter in dense.items()}
    return tables_of(model), weights, steps


def torchrecs_model(name, case):
    """The sharded model, and batches of it."""
    torch.manual_seed(0)
    tables = [
        MODELS[name][index // 2](
            name=table,
            num_embeddings=spec.rows,
            embedding_dim=spec.dim,
            feature_names=case.features[table],
        )
        for index, (table, spec) in enumerate(zip(case.names, case.tables, strict=True))
    ]
    weighted = []
    if name == "TestSparseNN":
        tables, weighted = tables[:2], tables[2:]
    model = getattr(theirs, name)(tables, weighted_tables=weighted)

    batches = (batch_of(tables, weighted, step, dist.get_rank()) for step in range(6))
    return shard(model, case), batches
