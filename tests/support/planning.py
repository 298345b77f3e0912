"""Workloads and configurations for tests of plans."""

from stampede.engine.config.load import load_config
from stampede.engine.job import build_model
from stampede.engine.job.optimizers import optimize_tables, scaled_hyperparameters
from stampede.engine.planning.planner import Cluster
from stampede.engine.planning.tables import data_of_sizes
from stampede.engine.planning.workload import workload
from support.paths import ROOT


def planned_config(*overrides, world_size=1, batch_size=64):
    """A configuration of tables without clicks."""
    sizes = [f"train.batch_size={batch_size}", f"evaluate.batch_size={batch_size}"]
    return load_config(ROOT / "configs/plan_10b.yaml", [*sizes, *overrides], world_size)


def model_and_work_of(config, world_size=1):
    """The model of a configuration of tables without clicks, and its workload."""
    data, ids = data_of_sizes(config.data), config.data.ids_per_sample
    model = build_model(config, data)
    optimize_tables(config, scaled_hyperparameters(config).scaled, model.front)
    return model, workload(config, data, ids, model, world_size, "cpu")


def gpus(world_size, gigabytes):
    """A cluster."""
    return Cluster(world_size, min(8, world_size), "cuda", int(gigabytes * 1e9))
