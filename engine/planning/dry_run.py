"""Plans a run for a cluster that need not exist: does it fit, what does it cost, what to change.

Nothing is allocated and no process is started.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from torchrec.distributed.planner.stats import EmbeddingStats
from torchrec.distributed.planner.types import ShardingOption
from torchrec.distributed.types import ShardingPlan

from stampede.data import open_prepared
from stampede.engine.config import Config
from stampede.engine.config.data import SizesSection, SyntheticSection
from stampede.engine.config.recipe import with_recipe
from stampede.engine.console import readable_bytes
from stampede.engine.errors import DoesNotFitError
from stampede.engine.job import build_model
from stampede.engine.job.optimizers import optimize_tables, scaled_hyperparameters
from stampede.engine.planning.planner import (
    Cluster,
    describe_plan,
    search_plan,
    shard_bytes,
    sharding_types,
)
from stampede.engine.planning.tables import planned_data
from stampede.engine.planning.workload import KINDS, Workload, workload
from stampede.engine.reading import data_folder
from stampede.files import to_json, write_file
from stampede.optim import cowclip_sharders
from stampede.settings import SettingsError

# If the devices are too small, the run is planned for larger ones, to show how much is missing:
# each time for devices larger by this factor, until the planner finds a plan.
_LARGER = 1.2
_ENDLESS = 1 << 60

# Even the best plan is a little uneven: how much room a proposal leaves above an even share.
_UNEVEN = 1.05


@dataclass(frozen=True)
class DryRun:
    """A plan and its costs.

    Attributes:
        config: of the run, completed by the recipe.
        plan: where the tables would be; if they do not fit, on larger devices.
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

    @property
    def fits(self) -> bool:
        """Whether every rank has enough memory."""
        return bool(self.memory["total"].max() <= self.cluster.usable)

    def to_dict(self) -> dict[str, Any]:
        """The result for JSON; memory in bytes."""
        tables = self.work.tables.items()
        shardings = (one for module in self.plan.plan.values() for one in module.items())
        return {
            "job": self.config.run.name,
            "fits": self.fits,
            "cluster": {**asdict(self.cluster), "usable": self.cluster.usable},
            "batch_size": self.work.batch_size,
            "optimizer": self.config.optim.embedding.optimizer,
            "tables": {
                name.removeprefix("t_"): {
                    "rows": table.rows,
                    "columns": table.columns,
                    "ids_per_sample": sum(table.ids),
                }
                for name, table in tables
            },
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
        SettingsError: no plan exists, however large the devices are.
        DataError: a file of the data cannot be used.
    """
    is_on_disk = not isinstance(config.data, SizesSection | SyntheticSection)
    data = planned_data(config, open_prepared(data_folder(config, True)) if is_on_disk else None)
    fields = len(data.vocabulary_sizes)
    config, _ = with_recipe(config, data.train.rows, fields, cluster.world_size)
    model = build_model(config, data)
    optimize_tables(config, scaled_hyperparameters(config).scaled, model.front)
    work = workload(config, data, model, cluster.world_size, cluster.device_type)
    types = sharding_types(config, cluster.world_size)
    even = work.common_bytes().sum() + work.table_bytes() / cluster.world_size
    devices = cluster
    while True:
        statistics = _Statistics()
        try:
            plan = search_plan(model, cowclip_sharders(), types, work, devices, statistics)
            break
        except SettingsError:
            if devices.memory > _ENDLESS:
                raise
        larger = max(devices.memory, even / (1.0 - cluster.reserved))
        devices = replace(cluster, memory=math.ceil(larger * _LARGER))
    costs = np.zeros((len(KINDS), cluster.world_size))
    milliseconds = np.zeros(cluster.world_size)
    for option in statistics.best_plan:
        for shard in option.shards:
            costs[:, shard.rank] += shard_bytes(work, option, shard)
            milliseconds[shard.rank] += shard.perf.total
    costs += work.common_bytes()[:, None]
    memory = dict(zip(KINDS, costs, strict=True)) | {"total": costs.sum(0)}
    if not work.keeps_mean:
        del memory["mean_of_weights"]
    lines = [line.strip("# ") for line in statistics._stats_table]
    return DryRun(config, work, cluster, plan, memory, milliseconds, lines)


def print_dry_run(config: Config, cluster: Cluster, out: Path | None) -> None:
    """Plan a run, print the report, and write it as JSON to `out`.

    Raises:
        DoesNotFitError: a rank has too little memory.
        SettingsError, DataError: see `dry_run`; or `out` cannot be written.
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
    if not done.fits:
        raise DoesNotFitError(_shortfall(done))


def _shortfall(done: DryRun) -> str:
    """Which rank lacks the most memory, and what to change."""
    work, cluster, total = done.work, done.cluster, done.memory["total"]
    usable, rank, size = cluster.usable, total.argmax(), readable_bytes
    free = ""
    if cluster.reserved:
        free = (
            f" ({cluster.reserved:.0%} of {size(cluster.memory)} stay free for CUDA, NCCL and "
            "fragmentation)"
        )
    tries = ["sharding.plan=auto"] if done.config.sharding.plan != "auto" else []
    # More devices help if what each of them needs, whatever the plan, leaves room for tables.
    room, node = usable / _UNEVEN - work.common_bytes().sum(), cluster.local_world_size
    if room > 0:
        devices = math.ceil(work.table_bytes() / room / node) * node
        tries.append(f"--world-size {max(devices, cluster.world_size + node)} or more")
    enough = math.ceil(total.max() / (1.0 - cluster.reserved) / 1e9)
    tries.append(f"--device-memory {enough}GB or more")
    if work.keeps_mean:
        tries.append("train.averaging=0")
    tries += [
        "an optimizer with less state (optim.embedding.optimizer=rowwise_adam)",
        "fewer rows",
        "a smaller model.dim or train.batch_size",
    ]
    return (
        f"rank {rank} needs {size(total[rank])} of {size(usable)}{free}: "
        f"{size(total[rank] - usable)} too much, and {int((total > usable).sum())} of "
        f"{cluster.world_size} ranks lack memory. Try {', '.join(tries[:-1])}, or {tries[-1]}"
    )


def report(done: DryRun) -> str:
    """The plan and its costs, in lines of at most 100 characters."""
    work, cluster, total = done.work, done.cluster, done.memory["total"]
    rows = sum(table.rows for table in work.tables.values())
    widths = sorted({table.columns for table in work.tables.values()})
    columns = f"{widths[0]} to {widths[-1]}" if len(widths) > 1 else widths[0]
    free = f", {cluster.reserved:.0%} of it kept free" if cluster.reserved else ""
    lines = [
        f"{done.config.run.name}: a dry run, nothing is allocated",
        f"  {len(work.tables)} tables, {rows:,} rows of {columns} columns, "
        f"optimizer {done.config.optim.embedding.optimizer}",
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
    verdict = "does not fit; these are the costs of a plan for devices that are large enough"
    if done.fits:
        left = readable_bytes(cluster.usable - total.max())
        verdict = f"fits: {left} left on rank {total.argmax()}"
    return "\n".join([*lines, "", verdict])


def _line(name: str, cells: Iterable[str], rank: object) -> str:
    right = "".join(f"{cell:>11}" for cell in cells)
    return f"  {name:<25}{right}{rank:>10}"
