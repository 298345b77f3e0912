"""Tables cut into parts that lie in one process, and what to train them with."""

from collections import defaultdict
from itertools import pairwise

import torch
from torchrec.distributed.types import ShardingEnv

from stampede.optim.backends import choose_backend
from stampede.optim.backends.torch import PendingUpdate
from stampede.optim.rows import sum_by_row
from stampede.optim.rules import SGD, Adagrad, Adam, RowWiseAdagrad, RowWiseAdam
from stampede.optim.sharded.reduction import CollectionGroups
from stampede.optim.table_array import TableArray, TableShard
from stampede.optim.update import update_
from support.reference import ReferenceTables

RULES = {
    "adam": [Adam(), Adam((0.0, 0.5), 1e-3, "torch")],
    "rowwise_adam": [RowWiseAdam(), RowWiseAdam((0.5, 0.9), 1e-3, "torch")],
    "adagrad": [Adagrad(), Adagrad(1e-2)],
    "rowwise_adagrad": [RowWiseAdagrad(), RowWiseAdagrad(1e-2)],
    "sgd": [SGD(), SGD(0.9)],
}


def reference_of(weights, settings):
    rule, clip = settings.rule, settings.clip
    name = next(name for name, rules in RULES.items() if type(rule) is type(rules[0]))
    arguments = {**vars(rule), **vars(clip), "rule": name}
    for key in ("l2", "weight_decay", "rows", "ar_alpha", "min_shrinkage"):
        arguments[key] = getattr(settings, key)
    return ReferenceTables(weights, **arguments)


class Parts:
    """Tables cut by rows and columns into several arrays of one process.

    Args:
        tables: by name, `[rows, dim]`; all of one width.
        row_cuts, column_cuts: by name, where each table is cut.
        spread: number of arrays that pieces of one kind are dealt to.
    """

    def __init__(self, tables, settings, row_cuts=None, column_cuts=None, spread=1):
        self.tables = {name: table.clone() for name, table in tables.items()}
        pieces = defaultdict(list)
        split_blocks = {}
        for name, table in tables.items():
            rows = sorted({0, *(row_cuts or {}).get(name, ()), len(table)})
            columns = sorted({0, *(column_cuts or {}).get(name, ()), table.shape[1]})
            for position, (first, stop) in enumerate(pairwise(rows)):
                for left, right in pairwise(columns):
                    shard = TableShard(name, stop - first, first, left)
                    pieces[left, right, position % spread].append(shard)
                if len(columns) > 2:
                    split_blocks[name, first] = (0,)
        self.arrays = []
        for (left, right, _), shards in pieces.items():
            parts = [tables[s.table][s.row_offset : s.row_offset + s.rows] for s in shards]
            weights = torch.cat(parts)[:, left:right].contiguous()
            dim = next(iter(tables.values())).shape[1]
            self.arrays.append(TableArray.create(shards, weights, settings, dim))
        self.groups = CollectionGroups(
            split_blocks,
            dict.fromkeys(tables, settings),
            ShardingEnv.from_local(1, 0),
            torch.device("cpu"),
        )

    def step(self, occurrences, lr, step):
        """One update from `(ids, gradients)` of each table's occurrences."""
        updates = []
        for array in self.arrays:
            ids, grads = [], []
            left, columns = array.shards[0].column_offset, array.weights.shape[1]
            for shard, start in zip(array.shards, array.starts, strict=False):
                rows, values = occurrences[shard.table]
                here = (rows >= shard.row_offset) & (rows < shard.row_offset + shard.rows)
                ids.append(rows[here] - shard.row_offset + start)
                grads.append(values[here, left : left + columns])
            batch = sum_by_row(torch.cat(ids), torch.cat(grads))
            updates.append(PendingUpdate(choose_backend(array), batch, lr, step))
        row_counts = sum(update_(updates, [self.groups])).tolist()
        return dict(zip(("touched", "clipped", "skipped"), row_counts, strict=True))

    def gathered(self, pick=lambda array: array.weights):
        """What `pick` returns for each array, as whole tables."""
        whole = {name: torch.full_like(t, torch.nan) for name, t in self.tables.items()}
        for array in self.arrays:
            for shard, start in zip(array.shards, array.starts, strict=False):
                rows = slice(shard.row_offset, shard.row_offset + shard.rows)
                values = pick(array)[start : start + shard.rows]
                if values.ndim == 1:
                    if shard.column_offset == 0:
                        whole[shard.table][rows] = values[:, None]
                else:
                    columns = slice(shard.column_offset, shard.column_offset + values.shape[1])
                    whole[shard.table][rows, columns] = values
        return whole

    def tensors(self):
        return [tensor for array in self.arrays for tensor in array.all_tensors()]


def random_tables(draw, sizes, dim):
    """Row norms over four decades: some rows are clipped, some are not."""
    tables = {}
    for i, rows in enumerate(sizes):
        scale = 10.0 ** -torch.randint(0, 4, (rows, 1), generator=draw)
        table = torch.randn(rows, dim, generator=draw, dtype=torch.float64) * scale
        tables[f"t{i}"] = table
    return tables


def random_batch(draw, tables, occurrences):
    """Ids that repeat, with gradients over three decades."""
    batch = {}
    for name, table in tables.items():
        ids = torch.randint(0, len(table), (occurrences,), generator=draw)
        grads = torch.randn(occurrences, table.shape[1], generator=draw, dtype=torch.float64)
        batch[name] = (ids, grads * 10.0 ** -torch.randint(0, 4, (occurrences, 1), generator=draw))
    return batch


def dense(batch, tables):
    """Gradients of whole tables, and counts."""
    grads = {n: torch.zeros_like(t).index_add_(0, *batch[n]) for n, t in tables.items()}
    return grads, {n: torch.bincount(batch[n][0], minlength=len(t)) for n, t in tables.items()}
