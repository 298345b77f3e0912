"""Plans a run for a cluster that need not exist: does it fit, what does it cost, what to change.

Nothing is allocated and no process is started.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torchrec.distributed.planner.stats import EmbeddingStats
from torchrec.distributed.planner.types import ShardingOption
from torchrec.distributed.types import ShardingPlan

from stampede.data import Dataset, open_prepared
from stampede.engine.config import Config
from stampede.engine.config.data import SizesSection, SyntheticSection
from stampede.engine.config.recipe import with_recipe
from stampede.engine.console import readable_bytes
from stampede.engine.job import build_model
from stampede.engine.job.optimizers import optimize_tables, scaled_hyperparameters
from stampede.engine.planning.planner import Cluster, describe_plan, search_plan
from stampede.engine.planning.tables import data_of_sizes, ids_per_sample, synthetic_data
from stampede.engine.planning.workload import KINDS, Workload, workload
from stampede.engine.reading import data_folder
from stampede.files import to_json, write_file
from stampede.optim import cowclip_sharders
from stampede.settings import SettingsError


@dataclass(frozen=True)
class DryRun:
    """A plan and its costs.

    Attributes:
        config: of the run, completed by the recipe.
        plan: where the tables would be.
        memory: bytes of each rank, `[ranks]` float64: of weights, their mean if devices hold one
            (`train.averaging`), optimizer state, activations, and their total.
        milliseconds: that the tables take in a step of each rank, `[ranks]` float64, as TorchRec
            estimates it.
        statistics: TorchRec's, of time, traffic and imbalance, as lines of its table.
    """

    config: Config
    work: Workload
    cluster: Cluster
    plan: ShardingPlan
    memory: dict[str, np.ndarray]
    milliseconds: np.ndarray
    statistics: list[str]

    def to_dict(self) -> dict[str, Any]:
        """The result for JSON; memory in bytes."""
        shardings = (one for module in self.plan.plan.values() for one in module.items())
        return {
            "job": self.config.run.name,
            "cluster": {**asdict(self.cluster), "usable": self.cluster.usable},
            "batch_size": self.work.batch_size,
            "sharding": {name: sharding.sharding_type for name, sharding in shardings},
            "memory_bytes": {
                kind: values.round().astype(int).tolist() for kind, values in self.memory.items()
            },
            "milliseconds_of_tables": self.milliseconds.round(3).tolist(),
            "torchrec": self.statistics,
        }


class _Statistics(EmbeddingStats):
    """TorchRec's statistics, and the plan with its costs that they are of."""

    best_plan: list[ShardingOption]

    def log(self, *arguments: Any, best_plan: list[ShardingOption], **named: Any) -> None:
        """Keep the plan."""
        self.best_plan = best_plan
        super().log(*arguments, best_plan=best_plan, **named)


def dry_run(config: Config, cluster: Cluster) -> DryRun:
    """Plan a run.

    Raises:
        DoesNotFitError: a rank would have too little memory.
        DataError: a file of the data cannot be used.
    """
    data, ids = _planned_data(config)
    fields = len(data.vocabulary_sizes)
    config, _ = with_recipe(config, data.train.rows, fields, cluster.world_size)
    model = build_model(config, data)
    optimize_tables(config, scaled_hyperparameters(config).scaled, model.front)
    work = workload(config, data, ids, model, cluster.world_size, cluster.device_type)
    statistics = _Statistics()
    plan = search_plan(config, model, cowclip_sharders(), work, cluster, statistics)
    costs = np.zeros((len(KINDS), cluster.world_size))
    milliseconds = np.zeros(cluster.world_size)
    for option in statistics.best_plan:
        for shard in option.shards:
            costs[:, shard.rank] += work.shard_bytes(option.name, option.sharding_type, shard.size)
            milliseconds[shard.rank] += shard.perf.total
    costs += work.common_bytes()[:, None]
    memory = dict(zip(KINDS, costs, strict=True)) | {"total": costs.sum(0)}
    if not work.keeps_mean:
        del memory["mean_of_weights"]
    lines = [line.strip("# ") for line in statistics._stats_table]
    return DryRun(config, work, cluster, plan, memory, milliseconds, lines)


def _planned_data(config: Config) -> tuple[Dataset, Mapping[str, float]]:
    """The data, as far as a plan needs them, and the mean ids per sample of some fields."""
    section = config.data
    if isinstance(section, SizesSection):
        return data_of_sizes(section), section.ids_per_sample
    if isinstance(section, SyntheticSection):
        data = synthetic_data(section)
    else:
        data = open_prepared(data_folder(config, True))
    return data, ids_per_sample(data)


def print_dry_run(config: Config, cluster: Cluster, out: Path | None) -> None:
    """Plan a run, print the report, and write it as JSON to `out`.

    Raises:
        DoesNotFitError, SettingsError, DataError: see `dry_run`; or `out` cannot be written.
    """
    if config.model.import_file:
        print(f"model.import: {config.model.import_file} was executed")
    done = dry_run(config, cluster)
    print(report(done), flush=True)
    if out is not None:
        try:
            write_file(out, to_json(done.to_dict(), indent=1) + "\n")
        except OSError as failure:
            raise SettingsError(
                f"--plan-out: {out} cannot be written ({failure.strerror or failure}); name a file "
                "in a folder that you may write to"
            ) from None


def report(done: DryRun) -> str:
    """The plan and its costs, in lines of at most 100 characters."""
    work, cluster, total = done.work, done.cluster, done.memory["total"]
    rows = sum(table.rows for table in work.tables.values())
    free = f", {cluster.reserved:.0%} of it kept free" if cluster.reserved else ""
    lines = [
        f"{done.config.run.name}: a dry run, nothing is allocated",
        f"  {len(work.tables)} tables, {rows:,} rows, optimizer "
        f"{done.config.optim.embedding.optimizer}",
        f"  {cluster.world_size} x {cluster.device_type} with {readable_bytes(cluster.memory)}"
        f"{free}, {cluster.local_world_size} in a node",
        f"  global batch {work.batch_size:,}, {work.local_batch_size:,} samples a rank",
        "",
        *(f"  {line}" for line in describe_plan(done.plan).split(", ")),
        "",
        _line("of a rank", ["least", "mean", "most"], "on rank"),
    ]
    table = [
        (kind.replace("_", " "), of_ranks, readable_bytes) for kind, of_ranks in done.memory.items()
    ]
    table.append(("tables' time in a step", done.milliseconds, "{:.2f} ms".format))
    for name, values, readable in table:
        each = (values.min(), values.mean(), values.max())
        lines.append(_line(name, map(readable, each), values.argmax()))
    left = readable_bytes(cluster.usable - total.max())
    return "\n".join([*lines, "", f"fits: {left} left on rank {total.argmax()}"])


def _line(name: str, cells: Iterable[str], rank: object) -> str:
    right = "".join(f"{cell:>11}" for cell in cells)
    return f"  {name:<25}{right}{rank:>10}"
