"""Builds the sharded model and its optimizers from a configuration."""

from __future__ import annotations

from torchrec.distributed.fbgemm_qcomm_codec import (
    CommType,
    QCommsConfig,
    get_qcomm_codecs_registry,
)
from torchrec.distributed.model_parallel import DistributedModelParallel

from stampede.data import Dataset
from stampede.engine.config import Config
from stampede.engine.job import Job, build_model, move_dense
from stampede.engine.job.compile import compile_network
from stampede.engine.job.optimizers import (
    dense_optimizer,
    optimize_tables,
    scaled_hyperparameters,
    table_inits,
)
from stampede.engine.job.precision import choose_precision
from stampede.engine.job.threads import step_threads
from stampede.engine.planning.planner import make_plan
from stampede.engine.planning.tables import ids_per_sample
from stampede.engine.planning.workload import workload
from stampede.engine.processes import Processes
from stampede.models import CTRModel, cpu
from stampede.optim import cowclip_sharders, local_lookup, table_update
from stampede.settings import SettingsError


def build(config: Config, dataset: Dataset, processes: Processes) -> Job:
    """Build the model on this rank."""
    scaling = scaled_hyperparameters(config)
    actual = scaling.scaled
    model = build_model(config, dataset)
    if model.batch_norms and config.train.reproducible:
        raise SettingsError(
            "train.reproducible: found true, but the network has batch norm, whose statistics join "
            "the tiles of a batch, and their bits would depend on the number of ranks; write "
            "model.normalization=layer and other activations than dice, or "
            "train.reproducible=false"
        )
    optimize_tables(config, actual, model.front)
    l2 = model.l2_terms()
    if model.number_weights is not None:
        # First-order weights of numbers decay with the tables' l2.
        l2[id(model.number_weights.weight)] = actual.embedding_l2
    sharded = _sharded(config, dataset, model, processes)
    dense_parameters = {
        name: parameter
        for name, parameter in sharded.named_parameters()
        if not hasattr(parameter, "_in_backward_optimizers")
    }
    threads = None
    # Compiling for the samples that are tried would take longer than any step.
    if processes.device.type == "cpu" and config.train.compile == "none":
        threads = step_threads(model, config.train.batch_size // processes.world_size)
    optimizer = dense_optimizer(config, actual, dense_parameters, l2)
    precision = processes.on_main(
        lambda: choose_precision(config.train.precision, processes.device)
    )
    return Job(
        sharded,
        dense_parameters,
        optimizer,
        scaling,
        precision,
        table_update(sharded),
        config.run.seed,
        config.train.on_nonfinite == "skip_batch",
        threads,
    )


def _sharded(
    config: Config, dataset: Dataset, model: CTRModel, processes: Processes
) -> DistributedModelParallel:
    """Plan the tables, which get their memory, and move the dense layers to the device."""
    communication, device = config.sharding.communication, processes.device
    sharders = cowclip_sharders(
        table_inits(config, model.front),
        qcomm_codecs_registry=get_qcomm_codecs_registry(
            QCommsConfig(CommType(communication.forward), CommType(communication.backward))
        ),
        kernels=config.run.kernels,
    )
    plan = make_plan(
        config,
        model,
        sharders,
        lambda: workload(
            config, dataset, ids_per_sample(dataset), model, processes.world_size, device.type
        ),
        processes,
    )
    move_dense(model, device)
    for norm in model.batch_norms:
        # From here on: planning tries the model on each rank by itself.
        norm.ranks = processes.world_size
    compile_network(model.network, config.train.compile, device)
    if device.type == "cpu":
        # Compile them now, if need be, rather than in the first step.
        cpu.available()
    # Dense layers are equal on all ranks; each step averages their gradients.
    sharded = DistributedModelParallel(
        model, device=device, plan=plan, sharders=sharders, init_data_parallel=False
    )
    front = model.front
    front.local = None if front.histories else local_lookup(front.ebc, front.fields)
    return sharded
