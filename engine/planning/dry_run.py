"""A plan for a cluster that is not there: nothing is allocated, no process is started."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torchrec.distributed.planner.types import PlannerError
from torchrec.distributed.types import ModuleSharder, ShardingPlan
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from stampede.engine.build import build_model
from stampede.engine.config import Config
from stampede.engine.errors import DoesNotFitError
from stampede.engine.plan import no_plan, sharding_types
from stampede.engine.planning.figures import Figures, figures
from stampede.engine.planning.planner import Cluster, search_plan
from stampede.engine.planning.remedies import shortfall
from stampede.engine.planning.report import report
from stampede.engine.planning.shards import placed_shards
from stampede.engine.planning.tables import planned_data
from stampede.engine.planning.workload import Workload, workload
from stampede.engine.recipe import LARGE_LOG, with_recipe
from stampede.engine.scaled import scaled_hyperparameters
from stampede.engine.table_optimizer import table_optimizer
from stampede.engine.whole_files import to_json, write_whole
from stampede.optim import cowclip_sharders
from stampede.settings import SettingsError

# Where the devices are too small, a plan for larger ones shows by how much: the smallest of these
# multiples of an even share that the planner finds a plan for.
_ROOM = (1.1, 1.4, 2.0, 4.0)
_ENDLESS = 1 << 60


@dataclass(frozen=True)
class DryRun:
    """A plan and what it asks for.

    Attributes:
        job: name of the run.
        optimizer: `optim.embedding.optimizer`.
        work: what is trained in a step.
        cluster: the devices.
        plan: where the tables would lie; where they do not fit, on larger devices.
        figures: what that takes.
    """

    job: str
    optimizer: str
    work: Workload
    cluster: Cluster
    plan: ShardingPlan
    figures: Figures

    @property
    def fits(self) -> bool:
        """Whether every rank has the memory it needs."""
        return bool(self.figures.total_memory.max() <= self.cluster.usable)

    def to_dict(self) -> dict[str, Any]:
        """For JSON; memory in bytes."""
        return {
            "job": self.job,
            "fits": self.fits,
            "cluster": {**asdict(self.cluster), "usable": self.cluster.usable},
            "batch_size": self.work.batch_size,
            "columns": self.work.columns,
            "optimizer": self.optimizer,
            "rows_looked_up": self.work.data.assumed,
            "tables": {
                table.field: {"rows": table.rows, "ids_per_sample": table.ids_per_sample}
                for table in self.work.data.tables
            },
            "sharding": {
                name: sharding.sharding_type
                for module in self.plan.plan.values()
                for name, sharding in module.items()
            },
            **self.figures.to_dict(),
        }


def dry_run(config: Config, cluster: Cluster) -> DryRun:
    """Plan a run.

    Raises:
        SettingsError: there is no such plan, however large the devices are.
        DataError: a file of the data cannot be used.
    """
    data = planned_data(config)
    config, _ = with_recipe(config, data.rows or LARGE_LOG, len(data.tables), cluster.world_size)
    model = build_model(config, data.vocabulary_sizes, data.numbers)
    kind, arguments = table_optimizer(
        config,
        scaled_hyperparameters(config).scaled,
        model.front.columns.dim,
        torch.device(cluster.device_type),
    )
    apply_optimizer_in_backward(kind, model.front.ebc.parameters(), arguments)
    work = workload(config, data, model, cluster.world_size)
    plan = _plan(config, model, cowclip_sharders(), work, cluster)
    found = figures(work, list(placed_shards(plan, work.shapes, cluster.world_size)))
    return DryRun(config.run.name, config.optim.embedding.optimizer, work, cluster, plan, found)


def print_dry_run(config: Config, cluster: Cluster, out: Path | None) -> None:
    """Plan a run, print the figures, and write them to `out`.

    Raises:
        DoesNotFitError: a rank has not the memory it needs.
        SettingsError, DataError: as `dry_run`; or the file cannot be written.
    """
    if config.model.import_file:
        print(f"model.import: {config.model.import_file} was executed")
    done = dry_run(config, cluster)
    print(report(done), flush=True)
    if out is not None:
        try:
            write_whole(out, to_json(done.to_dict(), indent=1) + "\n")
        except OSError as failure:
            raise SettingsError(
                f"--plan-out: {out} cannot be written ({failure.strerror or failure}); name a file "
                "in a folder that you may write to"
            ) from None
    if not done.fits:
        raise DoesNotFitError(shortfall(config, done))


def _plan(
    config: Config,
    model: nn.Module,
    sharders: list[ModuleSharder[nn.Module]],
    work: Workload,
    cluster: Cluster,
) -> ShardingPlan:
    types = sharding_types(
        config.sharding.plan, config.optim.embedding.optimizer, cluster.world_size
    )
    even = work.even_bytes()
    larger = [round(even * room / (1.0 - cluster.reserved)) for room in _ROOM]
    sizes = [cluster.memory, *(size for size in larger if size > cluster.memory), _ENDLESS]
    for memory in sizes:
        with_memory = Cluster(
            cluster.world_size, cluster.local_world_size, cluster.device_type, memory
        )
        try:
            return search_plan(model, sharders, types, work, with_memory)
        except PlannerError as failure:
            last = failure
    raise no_plan(types, cluster.world_size, last)
