"""The memory that a step of training takes.

Weights and optimizer states are exact. What lives during a step is estimated: all tensors as if at
the same time, each at its largest, and the rows of a table looked up equally often.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.distributed._tools.mem_tracker import MemTracker
from torchrec.distributed.types import ShardingType

from stampede.data import Dataset
from stampede.engine.config import Config
from stampede.models import CTRModel, table_name
from stampede.models.embedding_front import fields_of_tables
from stampede.models.histories import Jagged
from stampede.optim.sharded.sharders import optimizer_of
from stampede.optim.update_settings import UpdateSettings
from stampede.optim.waiting_rows import is_replayable

# What `Workload` counts, in this order.
KINDS = ("weights", "mean_of_weights", "optimizer_state", "activations")

FLOAT, LONG = 4, 8

# Bytes per looked-up id: the id as it arrives and in the order of the tables, its row, its bag, and
# a sort with its order (see `sum_by_row`), all int64; and per row of output: the length of its bag
# as it arrives and in the order of the tables.
_OF_ID, _OF_OUTPUT = 7 * LONG, 2 * 4

# Batch sizes of two passes; their difference in memory gives the memory of a sample.
_SAMPLES = (16, 32)


@dataclass(frozen=True)
class Table:
    """A table of the plan.

    Attributes:
        rows, columns: of the whole table.
        ids: mean ids per sample of each field that uses it.
        outputs: mean rows per sample that a lookup returns: of each field, or id of a history.
        is_pooled: whether a lookup returns a sum per sample, instead of a row per id.
        has_bags: whether a sample may have any number of ids of a field.
        settings: of its update.
    """

    rows: int
    columns: int
    ids: list[float]
    outputs: float
    is_pooled: bool
    has_bags: bool
    settings: UpdateSettings

    def state_bytes_per_row(self, columns: int) -> int:
        """Bytes of optimizer state per row of a shard with these columns."""
        clipped = self.settings.clip.columns or self.columns
        shapes = self.settings.rule.state_shapes(1, columns, has_rest=clipped < self.columns)
        # The step that a row is at is counted on every device, although some have no kernel that
        # makes up for missed steps.
        counter = FLOAT * is_replayable(self.settings)
        return FLOAT * sum(map(math.prod, shapes.values())) + counter


@dataclass(frozen=True)
class Workload:
    """A step of training.

    Attributes:
        tables: by name.
        dense_parameters: of the layers that every rank copies.
        sample_bytes: of a rank's sample: its inputs, embeddings, and activations.
        batch_size: global.
        keeps_mean: whether the devices hold a copy of all weights, see `EpochMean`.
    """

    tables: Mapping[str, Table]
    dense_parameters: int
    sample_bytes: float
    batch_size: int
    world_size: int
    keeps_mean: bool

    @property
    def local_batch_size(self) -> int:
        """Samples of a rank."""
        return self.batch_size // self.world_size

    def shard_bytes(self, name: str, sharding_type: str, size: Sequence[int]) -> np.ndarray:
        """Bytes of a shard of a table by `KINDS`; `size` is its rows and columns."""
        table, (rows, columns) = self.tables[name], size
        weights = rows * columns * FLOAT
        state = table.state_bytes_per_row(columns)
        is_copy = sharding_type == ShardingType.DATA_PARALLEL.value
        samples = self.local_batch_size if is_copy else self.batch_size
        share = rows / table.rows
        ids = samples * share * sum(table.ids)
        # A shard with some of the rows returns its part of the sum of every bag.
        outputs = samples * table.outputs * (1 if table.is_pooled else share)
        # Values per row that ranks sum if they share its columns, see `Measured`.
        summed = (3 + 2 * len(table.settings.rule.row_states)) * FLOAT
        # Looked-up rows and their gradients; the gradient, weights and states of different rows.
        row = 2 * columns * FLOAT
        step = ids * _OF_ID + outputs * (_OF_OUTPUT + row)
        if not table.settings.rule.is_frozen:
            step += min(ids, rows) * (row + state + 2 * LONG + summed)
        if table.settings.needs_all_rows:
            step += rows * summed
        return np.array([weights, weights * self.keeps_mean, rows * state, round(step)])

    def common_bytes(self) -> np.ndarray:
        """Bytes of every rank by `KINDS`, wherever the tables are."""
        weights = self.dense_parameters * FLOAT
        # The gradients, and the buckets that they are summed in.
        step = round(self.local_batch_size * self.sample_bytes) + 2 * weights
        # Adam has two moments.
        return np.array([weights, weights * self.keeps_mean, 2 * weights, step])

    def table_bytes(self) -> int:
        """Weights, their mean, and states of all tables together."""
        tables = self.tables.items()
        kind = ShardingType.TABLE_WISE.value
        return sum(
            int(self.shard_bytes(name, kind, (table.rows, table.columns))[:-1].sum())
            for name, table in tables
        )


def workload(
    config: Config,
    data: Dataset,
    ids_per_sample: Mapping[str, float],
    model: CTRModel,
    world_size: int,
    device_type: str,
) -> Workload:
    """The step that a configuration describes.

    Args:
        ids_per_sample: mean ids per sample of the fields that may have several.
        model: built from it, its tables on `meta`, with their optimizers (`optimize_tables`).
        device_type: `cuda` or `cpu`.
    """
    # Of the fields whose rows are looked up one by one.
    histories = {
        field: ids_per_sample.get(field, 1.0) for field in (*data.attention, *data.sequences)
    }
    tables = {}
    users_of = fields_of_tables(data.vocabulary_sizes, data.shared)
    for field, weights in model.front.weights().items():
        users, chosen = users_of[field], optimizer_of(weights)
        ids = [ids_per_sample.get(user, 1.0) for user in users]
        has_bags = any(user in ids_per_sample for user in users)
        outputs = sum(histories.get(user, 1.0) for user in users)
        is_pooled = not model.front.has_rows_apart(field)
        table = Table(*weights.shape, ids, outputs, is_pooled, has_bags, chosen.settings)
        tables[table_name(field)] = table
    # Embeddings as they arrive, in the order of the fields, and their gradient.
    embeddings = 3 * sum(table.outputs * table.columns for table in tables.values())
    # Ids of the batch, again as they are sent, and numbers with label and weight.
    ids = 2 * sum(sum(table.ids) for table in tables.values())
    inputs = ids * (LONG + FLOAT) + (data.numbers + 2) * FLOAT
    of_tables = {id(parameter) for parameter in model.front.parameters()}
    return Workload(
        tables,
        sum(p.numel() for p in model.parameters() if id(p) not in of_tables),
        inputs + embeddings * FLOAT + activation_bytes_per_sample(model, histories),
        config.train.batch_size,
        world_size,
        # On a GPU the mean is in main memory.
        keeps_mean=device_type == "cpu" and (config.train.averaging or 0) > 1,
    )


def activation_bytes_per_sample(model: CTRModel, ids: Mapping[str, float] | None = None) -> int:
    """Peak memory of forward and backward in bytes per sample.

    Runs a few samples on the CPU in float32. Counts the gradient of the looked-up rows, but not the
    rows themselves, nor weights and their gradients.

    Args:
        model: with dense layers on the CPU and tables on `meta`; it does not change.
        ids: mean ids per sample of each history.
    """
    front = model.front
    # A copy of all but the tables, so that running means and the like do not change.
    dense = copy.deepcopy(model, {id(front): front})
    peaks = []
    with torch.random.fork_rng(devices=[]):
        for samples in _SAMPLES:
            rows = torch.randn(samples, sum(front.widths), requires_grad=True)
            inputs = torch.randn(samples, model.numbers)
            tracker = MemTracker()
            histories = {
                name: _drawn_history(samples, mean, front.columns_of(name).stored)
                for name, mean in (ids or {}).items()
            }
            held = [rows, *(one.values for one in histories.values())]
            tracker.track_external(*held, inputs, dense)
            with tracker:
                logits = dense.logits(rows, inputs, histories=histories)
                # A network need not use its embeddings.
                torch.autograd.grad(logits.sum(), held, allow_unused=True)
            peak = tracker.get_tracker_snapshot("peak")[rows.device]["Total"]
            peaks.append(peak - sum(one.nbytes for one in (*held, inputs)))
    return -(-(peaks[1] - peaks[0]) // (_SAMPLES[1] - _SAMPLES[0]))


def _drawn_history(samples: int, mean: float, columns: int) -> Jagged:
    """Rows of ids, about `mean` for a sample."""
    ends = (torch.arange(samples + 1) * mean).round().long()
    lengths = ends.diff()
    return Jagged(torch.randn(int(ends[-1]), columns, requires_grad=True), lengths)
