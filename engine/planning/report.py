"""The figures of a plan as a table to read."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from stampede.engine.planning.figures import COMMUNICATION, MEMORY, TableGroup
from stampede.engine.planning.sizes import readable

if TYPE_CHECKING:
    from stampede.engine.planning.dry_run import DryRun

_NAMES = {
    "optimizer_state": "optimizer state",
    "ids": "ids",
    "pooled_rows": "pooled rows, forward",
    "gradients": "gradients, backward",
    "dense": "dense layers' gradients",
    "row_sums": "norms of split rows",
}
_WORST = 4
_FIELDS = 3


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
        f"{done.job}: a dry run, nothing is allocated",
        f"  {len(work.data.tables)} tables, {rows:,} rows of {work.columns} columns, "
        f"optimizer {done.optimizer}",
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
