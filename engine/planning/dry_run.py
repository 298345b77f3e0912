"""A plan for a cluster that is not there, what it takes, and what to do where that is too much.

Nothing is allocated, no process is started.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import TypeAdapter
from torch import nn
from torchrec.distributed.planner.types import PlannerError
from torchrec.distributed.types import ShardingPlan
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from stampede.engine.build import build_model
from stampede.engine.config import Config
from stampede.engine.config.optim import EmbeddingOptimSection
from stampede.engine.config.presets import with_preset
from stampede.engine.errors import DoesNotFitError
from stampede.engine.optimizers import scaled_hyperparameters, table_optimizer
from stampede.engine.planning.figures import COMMUNICATION, MEMORY, Figures, TableGroup, figures
from stampede.engine.planning.memory import TableStates
from stampede.engine.planning.planner import UNITS, Cluster, no_plan, search_plan, sharding_types
from stampede.engine.planning.workload import Workload, placed_shards, planned_data, workload
from stampede.engine.recipe import LARGE_LOG, with_recipe
from stampede.files import to_json, write_file
from stampede.optim import cowclip_sharders
from stampede.settings import SettingsError

# Where the devices are too small, a plan for larger ones shows by how much: the smallest of these
# multiples of an even share that the planner finds a plan for.
_ROOM = (1.1, 1.4, 2.0, 4.0)
_ENDLESS = 1 << 60

# The tables' optimizers that keep less than Adam, those nearest to it first.
_SMALLER = ("rowwise_adam", "adagrad", "rowwise_adagrad", "sgd")

# Even the best plans are not even: so much above an even share is asked of what is proposed.
_UNEVEN = 1.05

_NAMES = {
    "optimizer_state": "optimizer state",
    "ids": "ids",
    "pooled_rows": "pooled rows, forward",
    "gradients": "gradients, backward",
    "dense": "dense layers' gradients",
    "row_sums": "norms of split rows",
}
# Ranks and fields that the table names.
_WORST = 4
_FIELDS = 3


@dataclass(frozen=True)
class DryRun:
    """A plan and what it asks for.

    Attributes:
        config: of the run, nothing left to the recipe.
        work: what is trained in a step.
        cluster: the devices.
        plan: where the tables would lie; where they do not fit, on larger devices.
        figures: what that takes.
    """

    config: Config
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
            "job": self.config.run.name,
            "fits": self.fits,
            "cluster": {**asdict(self.cluster), "usable": self.cluster.usable},
            "batch_size": self.work.batch_size,
            "columns": self.work.columns,
            "optimizer": self.config.optim.embedding.optimizer,
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
    plan = _plan(config, model, work, cluster)
    found = figures(work, list(placed_shards(plan, work.shapes, cluster.world_size)))
    return DryRun(config, work, cluster, plan, found)


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
            write_file(out, to_json(done.to_dict(), indent=1) + "\n")
        except OSError as failure:
            raise SettingsError(
                f"--plan-out: {out} cannot be written ({failure.strerror or failure}); name a file "
                "in a folder that you may write to"
            ) from None
    if not done.fits:
        raise DoesNotFitError(shortfall(done))


def _plan(config: Config, model: nn.Module, work: Workload, cluster: Cluster) -> ShardingPlan:
    """The plan; where the devices are too small, one for larger ones."""
    optimizer = config.optim.embedding.optimizer
    types = sharding_types(
        config.sharding.plan,
        optimizer,
        cluster.world_size,
        reproducible=config.train.reproducible,
    )
    larger = [round(work.even_bytes() * room / (1.0 - cluster.reserved)) for room in _ROOM]
    sizes = [cluster.memory, *(size for size in larger if size > cluster.memory), _ENDLESS]
    for memory in sizes:
        try:
            return search_plan(
                model, cowclip_sharders(), types, work, replace(cluster, memory=memory)
            )
        except PlannerError as failure:
            last = failure
    raise no_plan(types, cluster.world_size, last)


def readable(count: float) -> str:
    """For example `1.44 TB` (10^12 bytes), three digits or more."""
    for unit in ("TB", "GB", "MB", "KB"):
        if count >= 0.9995 * UNITS[unit]:
            value = count / UNITS[unit]
            return f"{value:.{2 if value < 100 else 1}f} {unit}"
    return f"{count:.0f} B"


def shortfall(done: DryRun) -> str:
    """The rank that lacks most, and what would do instead."""
    config, cluster, total = done.config, done.cluster, done.figures.total_memory
    rank = done.figures.worst_rank
    beside = ""
    if cluster.reserved:
        beside = (
            f" ({cluster.reserved:.0%} of {readable(cluster.memory)} are kept free for CUDA, NCCL "
            "and fragments)"
        )
    return (
        f"rank {rank} needs {readable(total[rank])} of {readable(cluster.usable)}{beside}: "
        f"{readable(total[rank] - cluster.usable)} too much, and "
        f"{int((total > cluster.usable).sum())} of {cluster.world_size} ranks lack memory. "
        + _what_to_try(config, done)
    )


def _what_to_try(config: Config, done: DryRun) -> str:
    needed = done.cluster.usable
    tries = []
    if config.sharding.plan != "auto" and done.work.even_bytes() * _UNEVEN <= needed:
        tries.append("sharding.plan=auto or row_wise (an even share would fit)")
    else:
        devices = _devices(done)
        if devices is not None:
            tries.append(f"--world-size {devices} or more")
        enough = math.ceil(done.figures.total_memory.max() / (1.0 - done.cluster.reserved) / 1e9)
        tries.append(f"--device-memory {enough}GB or more")
        optimizer = _optimizer(config, done)
        if optimizer is not None:
            tries.append(f"optim.embedding.optimizer={optimizer}")
    tries.append("fewer rows or a smaller model.dim")
    if done.figures.memory["activations"].max() > 0.2 * needed:
        tries.append("a smaller train.batch_size")
    return f"Try {', '.join(tries[:-1])}, or {tries[-1]}"


def _devices(done: DryRun) -> int | None:
    """Whole nodes that would hold even shares; None where more devices do not help."""
    work, node = done.work, done.cluster.local_world_size
    room = done.cluster.usable / _UNEVEN - work.common_bytes()
    if room <= 0:
        return None
    nodes = math.ceil(work.table_bytes() / room / node)
    return max(nodes * node, done.cluster.world_size + node)


def _optimizer(config: Config, done: DryRun) -> str | None:
    """The first that keeps little enough; None where none does."""
    work = done.work
    for name in _SMALLER:
        states = TableStates.of(_with_optimizer(config, name), config.model.dim, work.columns)
        smaller = replace(work, states=states)
        is_smaller = smaller.table_bytes() < work.table_bytes()
        if is_smaller and smaller.even_bytes() * _UNEVEN <= done.cluster.usable:
            return name
    return None


def _with_optimizer(config: Config, name: str) -> Config:
    """The same with another optimizer of the tables, its other keys as the paper has them."""
    values = with_preset({"preset": "paper", "optim": {"embedding": {"optimizer": name}}})
    section = TypeAdapter(EmbeddingOptimSection).validate_python(values["optim"]["embedding"])
    optim = config.optim.model_copy(update={"embedding": section})
    return config.model_copy(update={"optim": optim})


def report(done: DryRun) -> str:
    """All of it, in lines of at most 100 characters."""
    return "\n".join(
        [*_head(done), "", *_tables(done), "", *_memory(done), "", *_step(done), "", _verdict(done)]
    )


def _head(done: DryRun) -> list[str]:
    work, cluster = done.work, done.cluster
    rows = sum(table.rows for table in work.data.tables)
    kept = f", {cluster.reserved:.0%} of it kept free" if cluster.reserved else ""
    return [
        f"{done.config.run.name}: a dry run, nothing is allocated",
        f"  {len(work.data.tables)} tables, {rows:,} rows of {work.columns} columns, "
        f"optimizer {done.config.optim.embedding.optimizer}",
        f"  {cluster.world_size} x {cluster.device_type} with {readable(cluster.memory)}{kept}, "
        f"{cluster.local_world_size} in a node",
        f"  global batch {work.batch_size:,}, {work.local_batch_size:,} samples a rank",
        f"  rows are looked up: {done.work.data.assumed}",
    ]


def _tables(done: DryRun) -> list[str]:
    lines = [f"  {'sharding':<18}{'tables':>7}{'rows':>19}{'parts':>8}{'ranks':>7}  fields"]
    for kind, group in done.figures.groups.items():
        lines.append(
            f"  {kind:<18}{len(group.fields):>7}{group.rows:>19,}{group.shards:>8,}"
            f"{group.ranks:>7,}  {_fields(group)}"
        )
    return lines


def _fields(group: TableGroup) -> str:
    """The largest tables, as many as the line has room for."""
    room, shown = 34, ""
    for position, name in enumerate(group.fields[:_FIELDS]):
        longer = f"{shown}, {name}" if position else name
        if len(longer) > room:
            break
        shown = longer
    left = len(group.fields) - (len(shown.split(", ")) if shown else 0)
    return shown + (f" and {left} more" if shown and left else f"{left} of them" if left else "")


def _memory(done: DryRun) -> list[str]:
    found = done.figures
    lines = [f"  {'memory of a rank':<25}{'least':>11}{'mean':>11}{'most':>11}   on rank"]
    for name in MEMORY:
        lines.append(_spread(_NAMES.get(name, name), found.memory[name]))
    total = found.total_memory
    lines.append(_spread("total", total))
    worst = np.argsort(-total, kind="stable")[:_WORST]
    ranks = ", ".join(f"{rank} ({readable(total[rank])})" for rank in worst)
    lines.append(f"  largest: {ranks}")
    return lines


def _spread(name: str, values: np.ndarray) -> str:
    sizes = (values.min(), values.mean(), values.max())
    return f"  {name:<25}" + "".join(f"{readable(v):>11}" for v in sizes) + f"{values.argmax():>10}"


def _step(done: DryRun) -> list[str]:
    found = done.figures
    lines = [f"  {'sent in a step':<25}{'mean':>11}{'most':>11}   on rank{'all ranks':>14}"]
    for name in COMMUNICATION:
        lines.append(_sent(_NAMES[name], found.sent[name]))
    lines.append(_sent("total", found.total_sent))
    lookups = found.lookups
    lines += [
        f"  lookups in a step: {lookups.mean():,.0f} a rank in the mean, {lookups.max():,.0f} on "
        f"rank {lookups.argmax()}",
        "  imbalance, most over mean: "
        + ", ".join(f"{name} {value:.2f}" for name, value in found.imbalance().items()),
    ]
    return lines


def _sent(name: str, values: np.ndarray) -> str:
    sizes = f"{readable(values.mean()):>11}{readable(values.max()):>11}"
    return f"  {name:<25}{sizes}{values.argmax():>10}{readable(values.sum()):>14}"


def _verdict(done: DryRun) -> str:
    total, usable = done.figures.total_memory.max(), done.cluster.usable
    if done.fits:
        return f"fits: {readable(usable - total)} left on rank {done.figures.worst_rank}"
    return "does not fit; these figures are those of a plan for devices that are large enough"
