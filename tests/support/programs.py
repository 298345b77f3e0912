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

from stampede.optim import local_cowclip_tables
from support.gathering import states_of, tables_of
from support.parity import (
    Case,
    Holder,
    Table,
    build_collection,
    global_batch,
    local_batch,
    local_part,
    shard,
    sharded_loss,
)
from support.torchrec_models import batch_of
from support.unsharded import process_group

CPU = torch.device("cpu")


def train(case, model, steps):
    for step in steps:
        sharded_loss(
            case, model, local_batch(global_batch(case, step), local_part(case))
        ).backward()


def everything(model):
    """Whole tables and states; on rank 0 only."""
    states = model.fused_optimizer.state_dict()["state"]
    return {"weights": tables_of(model), "states": states_of(states)}


def checkpoint_of(model):
    """What a program hands to DCP; loading writes into these tensors."""
    return {
        "model": model.state_dict(),
        "optimizer": model.fused_optimizer.state_dict(),
    }


@process_group()
def save_and_load(to_save, into, to_load, source):
    """Train each case of `to_save`, save it in the folder `into`, and take one more step.

    Then load each case of `to_load` from `source`, under its own plan, and take that step.

    Returns:
        By case saved or loaded, what it was at that time, and after the step.
    """
    saved = [_save(case, f"{into}/{index}") for index, case in enumerate(to_save)]
    return saved, [_load(case, f"{source}/{index}") for index, case in enumerate(to_load)]


def _save(case, folder):
    model = shard(Holder(build_collection(case)), case)
    train(case, model, range(1, 4))
    dcp.save(checkpoint_of(model), checkpoint_id=folder)
    at_save = everything(model)
    train(case, model, [4])
    return at_save, everything(model)


def _load(case, folder):
    model = shard(Holder(build_collection(case)), case)
    train(case, model, [9])  # So that nothing is right by itself.
    checkpoint = checkpoint_of(model)
    dcp.load(checkpoint, checkpoint_id=folder)
    model.load_state_dict(checkpoint["model"])
    model.fused_optimizer.load_state_dict(checkpoint["optimizer"])
    at_load = everything(model)
    train(case, model, [4])
    return at_load, everything(model)


@process_group()
def update_with_nans():
    """A backward whose gradients are NaN in the last sample of the last rank, then a good one.

    Returns:
        For `error` and for `skip_row`: the error, the rows skipped on this rank, and the tables
        at the start and after each backward.
    """
    return [_with_nans(nan_case(choice)) for choice in ("error", "skip_row")]


def _with_nans(case):
    model = shard(Holder(build_collection(case)), case)
    tables = [tables_of(model)]
    batch = local_batch(global_batch(case, 1), local_part(case))
    if dist.get_rank() == dist.get_world_size() - 1:
        for _, _, _, targets in batch.values():
            targets[-1] = float("nan")
    error = None
    try:
        sharded_loss(case, model, batch).backward()
    except ValueError as raised:
        error = type(raised).__name__
    tables.append(tables_of(model))
    train(case, model, [2])
    tables.append(tables_of(model))
    skipped = sum(int(t.row_counts[2]) for t in local_cowclip_tables(model))
    return error, skipped, tables


def nan_case(choice):
    return Case(
        ("table_wise", "column_wise", "row_wise", "data_parallel"),
        tables=(Table(40), Table(23, features=2), Table(30), Table(60)),
        arguments={"on_nonfinite": choice},
        empty_rank=False,
    )


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
    model, inputs = torchrecs_model(name, case)
    dense = dict(in_backward_optimizer_filter(model.named_parameters()))
    optimizer = torch.optim.SGD(dense.values(), lr=0.1)
    steps = 0
    if kind in (None, "compiled"):
        run = torch.compile(model, backend="aot_eager") if kind else model
        for batch in inputs(6):
            optimizer.zero_grad()
            run(batch)[0].backward()
            optimizer.step()
            steps += 1
    else:
        is_compiled = kind == "TrainPipelinePT2"
        compiled = TorchCompileConfig(backend="aot_eager", compile_on_iter=1)
        configs = {"compile_configs": compiled} if is_compiled else {}
        pipeline = getattr(train_pipelines, kind)(model, optimizer, CPU, **configs)
        batches = inputs(6)
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
    """The sharded model, and a function that makes some batches of it."""
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

    def inputs(count):
        here = {"ranks": dist.get_world_size(), "rank": dist.get_rank()}
        return (batch_of(tables, weighted, step, **here) for step in range(count))

    return shard(model, case), inputs
