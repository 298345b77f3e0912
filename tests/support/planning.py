"""Workloads and configurations for tests of plans."""

from stampede.engine.config.load import load_config
from stampede.engine.planning.planner import Cluster
from support.paths import ROOT


def planned_config(*overrides, world_size=1, batch_size=64):
    """A configuration of tables without clicks."""
    sizes = [f"train.batch_size={batch_size}", f"evaluate.batch_size={batch_size}"]
    return load_config(ROOT / "configs/plan_10b.yaml", [*sizes, *overrides], world_size)


def gpus(world_size, gigabytes):
    """A cluster."""
    return Cluster(world_size, min(8, world_size), "cuda", int(gigabytes * 1e9))
