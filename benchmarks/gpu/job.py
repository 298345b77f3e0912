"""A DeepFM with chosen tables, without a configuration."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from stampede.data.synthetic import NUMBERS
from stampede.engine.job import Job, move_dense
from stampede.engine.job.compile import compile_network
from stampede.engine.job.precision import choose_precision
from stampede.models import CTRModel, table_name
from stampede.optim import (
    CowClip,
    CowClipAdam,
    DenseAdam,
    Hyperparameters,
    Scaled,
    TableInit,
    cowclip_sharders,
    table_update,
)

DIM, HIDDEN = 10, (400, 400, 400)

# Without a scaling rule.
RATES, BATCH = Hyperparameters(embedding_lr=1e-3, embedding_l2=1e-5, dense_lr=1e-3), 1024

# A class of optimizers of tables, and its arguments.
TableOptimizer = tuple[type[torch.optim.Optimizer], dict[str, Any]]


def deepfm(
    sizes: Sequence[int],
    device: torch.device,
    *,
    precision: str = "fp32",
    compilation: str = "none",
    rows: str = "all",
    hidden: Sequence[int] = HIDDEN,
    tables: TableOptimizer | None = None,
    kernels: str = "triton",
) -> Job:
    """A DeepFM on one device; needs a process group of one process.

    Args:
        sizes: rows of each field's table.
        precision, compilation, rows: as in the configuration.
        tables: their optimizer; CowClip's by default.
        kernels: as in the configuration; a wrong one shall be seen, not replaced.
    """
    vocabulary = {f"C{field + 1}": size for field, size in enumerate(sizes)}
    model = CTRModel("deepfm", vocabulary, NUMBERS, DIM, hidden, seed=0)
    arguments = {
        "lr": RATES.embedding_lr,
        "l2": RATES.embedding_l2,
        "clip": CowClip(columns=DIM),
        "rows": rows,
    }
    kind, arguments = tables or (CowClipAdam, arguments)
    apply_optimizer_in_backward(kind, model.front.parameters(), arguments)
    sharders = cowclip_sharders(TableInit(1e-4, DIM, 0), kernels=kernels)
    on_device = ParameterConstraints(
        sharding_types=["table_wise"], compute_kernels=[EmbeddingComputeKernel.FUSED.value]
    )
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=1, compute_device=device.type),
        constraints={table_name(field): on_device for field in model.front.fields},
    )
    move_dense(model, device)
    compile_network(model.network, compilation, device)
    sharded = DistributedModelParallel(
        model,
        device=device,
        plan=planner.plan(model, sharders),
        sharders=sharders,
        init_data_parallel=False,
    )
    dense = {
        name: parameter
        for name, parameter in sharded.named_parameters()
        if not hasattr(parameter, "_in_backward_optimizers")
    }
    return Job(
        sharded,
        dense,
        DenseAdam(dense.values(), lr=RATES.dense_lr),
        Scaled("none", BATCH, BATCH, RATES, RATES),
        choose_precision(precision, device),
        table_update=table_update(sharded),
    )
