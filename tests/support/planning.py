"""Workloads and configurations for tests of plans."""

from stampede.engine.config.load import load_config
from stampede.engine.job import build_model
from stampede.engine.job.optimizers import optimize_tables, scaled_hyperparameters
from stampede.engine.planning.planner import Cluster
from stampede.engine.planning.tables import planned_data
from stampede.engine.planning.workload import workload
from support.paths import ROOT


def planned_config(*overrides, world_size=1, batch_size=64):
    """A configuration of tables without clicks."""
    sizes = [f"train.batch_size={batch_size}", f"evaluate.batch_size={batch_size}"]
    return load_config(ROOT / "configs/plan_10b.yaml", [*sizes, *overrides], world_size)


def work_of(config, world_size=1):
    """The workload of a configuration."""
    data = planned_data(config)
    model = build_model(config, data)
    optimize_tables(config, scaled_hyperparameters(config).scaled, model.front)
    return workload(config, data, model, world_size, "cpu")


def gpus(world_size, gigabytes):
    """A cluster."""
    return Cluster(world_size, min(8, world_size), "cuda", int(gigabytes * 1e9))
