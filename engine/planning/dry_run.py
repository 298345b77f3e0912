"""Plans a run for a cluster that need not exist: does it fit, what does it cost, what to change.

Nothing is allocated and no process is started.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from torchrec.distributed.planner.stats import EmbeddingStats
from torchrec.distributed.types import ShardingPlan

from stampede.data.prepared.reader import open_prepared
from stampede.engine.config import Config
from stampede.engine.config.data import SizesSection, SyntheticSection
from stampede.engine.config.optim import OptimSection
from stampede.engine.config.presets import with_preset
from stampede.engine.config.recipe import LARGE_LOG, with_recipe
from stampede.engine.console import readable_bytes
from stampede.engine.errors import DoesNotFitError
from stampede.engine.job import build_model
from stampede.engine.job.optimizers import optimize_tables, scaled_hyperparameters
from stampede.engine.planning.planner import Cluster, describe_plan, search_plan, sharding_types
from stampede.engine.planning.tables import planned_data
from stampede.engine.planning.workload import PlacedShard, TableStates, Workload, workload
from stampede.engine.reading import data_folder
from stampede.files import to_json, write_file
from stampede.optim import cowclip_sharders
from stampede.settings import SettingsError

# If the devices are too small, the run is planned for larger ones, to show how much is missing: for
# these multiples of an even share, in turn, until the planner finds a plan.
_LARGER = (1.1, 1.4, 2.0, 4.0)
_ENDLESS = 1 << 60

# Optimizers of the tables with less state than Adam, the most similar ones first.
_SMALLER = ("rowwise_adam", "adagrad", "rowwise_adagrad", "sgd")

# Even the best plan is a little uneven: how much room a proposal leaves above an even share.
_UNEVEN = 1.05

# How many ranks the report names.
_WORST = 4


@dataclass(frozen=True)
class DryRun:
    """A plan and its costs.

    Attributes:
        config: of the run, completed by the recipe.
        plan: where the tables would be; if they do not fit, on larger devices.
        memory: bytes of each rank, `[ranks]` float64: of weights, their mean if devices hold one
            (`train.averaging`), optimizer state, activations, and their total.
        lookups: expected ids that each rank looks up in a step, `[ranks]` float64.
        statistics: TorchRec's, of time, traffic and imbalance, as lines of its table.
    """

    config: Config
    work: Workload
    cluster: Cluster
    plan: ShardingPlan
    memory: dict[str, np.ndarray]
    lookups: np.ndarray
    statistics: list[str]

    @property
    def fits(self) -> bool:
        """Whether every rank has enough memory."""
        return bool(self.memory["total"].max() <= self.cluster.usable)

    def to_dict(self) -> dict[str, Any]:
        """The result for JSON; memory in bytes."""
        return {
            "job": self.config.run.name,
            "fits": self.fits,
            "cluster": {**asdict(self.cluster), "usable": self.cluster.usable},
            "batch_size": self.work.batch_size,
            "optimizer": self.config.optim.embedding.optimizer,
            "rows_looked_up": self.work.data.assumed,
            "tables": {
                table.field: {
                    "rows": table.rows,
                    "columns": self.work.states[name].dim,
                    "ids_per_sample": table.ids_per_sample,
                }
                for name, table in self.work.tables.items()
            },
            "sharding": {
                name: sharding.sharding_type
                for module in self.plan.plan.values()
                for name, sharding in module.items()
            },
            "memory_bytes": {
                kind: values.round().astype(int).tolist() for kind, values in self.memory.items()
            },
            "lookups": self.lookups.round(1).tolist(),
            "torchrec": self.statistics,
        }


def dry_run(config: Config, cluster: Cluster) -> DryRun:
    """Plan a run.

    Raises:
        SettingsError: no plan exists, however large the devices are.
        DataError: a file of the data cannot be used.
    """
    is_without = isinstance(config.data, SizesSection | SyntheticSection)
    data = planned_data(config, None if is_without else open_prepared(data_folder(config)))
    config, _ = with_recipe(
        config, data.rows or LARGE_LOG, len(data.vocabulary_sizes), cluster.world_size
    )
    model = build_model(config, data)
    optimize_tables(config, scaled_hyperparameters(config).scaled, model.front)
    work = workload(config, data, model, cluster.world_size, cluster.device_type)
    stats = EmbeddingStats()
    types = sharding_types(config, cluster.world_size)
    larger = [round(work.even_bytes() * factor / (1.0 - cluster.reserved)) for factor in _LARGER]
    for memory in (cluster.memory, *(m for m in larger if m > cluster.memory), _ENDLESS):
        try:
            devices = replace(cluster, memory=memory)
            plan = search_plan(model, cowclip_sharders(), types, work, devices, stats)
            break
        except SettingsError:
            if memory == _ENDLESS:
                raise
    costs = plan_costs(work, list(work.placed_shards(plan)))
    lines = [line.strip("# ") for line in stats._stats_table]
    return DryRun(config, work, cluster, plan, *costs, lines)


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
    tries = []
    if done.config.sharding.plan != "auto" and work.even_bytes() * _UNEVEN <= usable:
        tries.append("sharding.plan=auto or row_wise (an even share would fit)")
    else:
        # More devices help if what each of them needs, whatever the plan, leaves room for tables.
        room, node = usable / _UNEVEN - work.common_bytes(), cluster.local_world_size
        if room > 0:
            devices = math.ceil(work.table_bytes() / room / node) * node
            tries.append(f"--world-size {max(devices, cluster.world_size + node)} or more")
        enough = math.ceil(total.max() / (1.0 - cluster.reserved) / 1e9)
        tries.append(f"--device-memory {enough}GB or more")
        without_mean = replace(work, keeps_mean=False)
        if work.keeps_mean and without_mean.even_bytes() * _UNEVEN <= usable:
            tries.append("train.averaging=0")
        if optimizer := _smaller_optimizer(done):
            tries.append(f"optim.embedding.optimizer={optimizer}")
    tries.append("fewer rows or a smaller model.dim")
    if done.memory["activations"].max() > 0.2 * usable:
        tries.append("a smaller train.batch_size")
    return (
        f"rank {rank} needs {size(total[rank])} of {size(usable)}{free}: "
        f"{size(total[rank] - usable)} too much, and {int((total > usable).sum())} of "
        f"{cluster.world_size} ranks lack memory. Try {', '.join(tries[:-1])}, or {tries[-1]}"
    )


def _smaller_optimizer(done: DryRun) -> str | None:
    """The first with small enough state, other keys as in the paper; None if all need too much."""
    work, model = done.work, build_model(done.config, done.work.data)
    for name in _SMALLER:
        values = with_preset({"preset": "paper", "optim": {"embedding": {"optimizer": name}}})
        section = OptimSection(embedding=values["optim"]["embedding"]).embedding
        optim = done.config.optim.model_copy(update={"embedding": section})
        config = done.config.model_copy(update={"optim": optim})
        smaller = replace(work, states=TableStates.of_tables(config, model.front))
        is_smaller = smaller.table_bytes() < work.table_bytes()
        if is_smaller and smaller.even_bytes() * _UNEVEN <= done.cluster.usable:
            return name
    return None


def report(done: DryRun) -> str:
    """The plan and its costs, in lines of at most 100 characters."""
    work, cluster, total, lookups = done.work, done.cluster, done.memory["total"], done.lookups
    rows = sum(table.rows for table in work.data.tables)
    widths = sorted({states.dim for states in work.states.values()})
    columns = f"{widths[0]} to {widths[-1]}" if len(widths) > 1 else widths[0]
    free = f", {cluster.reserved:.0%} of it kept free" if cluster.reserved else ""
    lines = [
        f"{done.config.run.name}: a dry run, nothing is allocated",
        f"  {len(work.data.tables)} tables, {rows:,} rows of {columns} columns, "
        f"optimizer {done.config.optim.embedding.optimizer}",
        f"  {cluster.world_size} x {cluster.device_type} with {readable_bytes(cluster.memory)}"
        f"{free}, {cluster.local_world_size} in a node",
        f"  global batch {work.batch_size:,}, {work.local_batch_size:,} samples a rank",
        f"  rows are looked up: {work.data.assumed}",
        "",
        *(f"  {line}" for line in describe_plan(done.plan).split(", ")),
    ]
    lines += ["", _line("memory of a rank", ["least", "mean", "most"], "on rank")]
    for name, values in done.memory.items():
        each = (values.min(), values.mean(), values.max())
        lines.append(_line(name.replace("_", " "), map(readable_bytes, each), values.argmax()))
    worst = np.argsort(-total, kind="stable")[:_WORST]
    ranks = ", ".join(f"{rank} ({readable_bytes(total[rank])})" for rank in worst)
    verdict = "does not fit; these are the costs of a plan for devices that are large enough"
    if done.fits:
        left = readable_bytes(cluster.usable - total.max())
        verdict = f"fits: {left} left on rank {total.argmax()}"
    lines += [
        f"  largest: {ranks}",
        f"  lookups in a step: {lookups.mean():,.0f} a rank on average, {lookups.max():,.0f} on "
        f"rank {lookups.argmax()}",
        "",
        verdict,
    ]
    return "\n".join(lines)


def _line(name: str, cells: Iterable[str], rank: object) -> str:
    right = "".join(f"{cell:>11}" for cell in cells)
    return f"  {name:<25}{right}{rank:>10}"


def plan_costs(
    work: Workload, shards: Sequence[PlacedShard]
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Add up what the shards cost the ranks that hold them: see `DryRun`."""
    rank_of = [shard.rank for shard in shards]

    def by_rank(cost: Callable[[PlacedShard], float]) -> np.ndarray:
        return np.bincount(rank_of, [cost(shard) for shard in shards], work.world_size)

    weights = work.dense_weight_bytes() + by_rank(work.weight_bytes)
    memory = {
        "weights": weights,
        **({"mean_of_weights": weights} if work.keeps_mean else {}),
        "optimizer_state": work.dense_state_bytes() + by_rank(work.state_bytes),
        "activations": work.common_activation_bytes() + by_rank(work.activation_bytes),
    }
    return memory | {"total": sum(memory.values())}, by_rank(work.lookups)
