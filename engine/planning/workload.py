"""The work of a training step: tables, lookups of their rows, and bytes.

Weights and optimizer states are exact. Activations are upper bounds: they count all tensors of a
step as if they lived at the same time, each at its largest. On a CPU, steps took one to two thirds.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch.distributed._tools.mem_tracker import MemTracker
from torchrec.distributed.types import ShardingPlan, ShardingType

from stampede.engine.config import Config
from stampede.engine.job.optimizers import scaled_hyperparameters, table_optimizer
from stampede.engine.planning.tables import PlannedData, PlannedTable
from stampede.models import CTRModel, EmbeddingFront, table_name
from stampede.models.histories import Jagged
from stampede.optim.table_array import TableArray, TableShard
from stampede.optim.update_settings import UpdateSettings
from stampede.optim.waiting_rows import is_replayable

FLOAT, LONG = 4, 8
# Lengths of bags are int32.
INT = 4

# Bytes per looked-up id, besides the id itself: its row, its bag, and a sort with its order (see
# `sum_by_row`), all int64.
_SORTING = 5 * LONG

# int32, see `optim/waiting_rows.py`.
_STEP_COUNTER = 4

# Batch sizes of two passes; their difference in memory gives the memory of a sample.
_SAMPLES = (16, 32)


@dataclass(frozen=True)
class PlacedShard:
    """A shard of a table, on a rank; `sharding_type` is TorchRec's name."""

    table: str
    sharding_type: str
    rank: int
    row_offset: int
    rows: int
    column_offset: int
    columns: int

    @property
    def is_replicated(self) -> bool:
        """Whether each rank has a whole copy, for its own part of the batch."""
        return self.sharding_type == ShardingType.DATA_PARALLEL.value


@dataclass(frozen=True)
class TableStates:
    """The state of a table's optimizer.

    Attributes:
        dim: columns of a stored row.
        settings: of its update.
    """

    dim: int
    settings: UpdateSettings

    @classmethod
    def of_tables(cls, config: Config, front: EmbeddingFront) -> dict[str, TableStates]:
        """The states of the tables' optimizers, by name of the table."""
        scaled, found = scaled_hyperparameters(config).scaled, {}
        for table in front.tables:
            columns = front.columns_of(table)
            kind, arguments = table_optimizer(config, scaled, columns.dim, table)
            settings = kind.update_settings(kind.defaults_with(arguments))
            found[table_name(table)] = cls(columns.stored, settings)
        return found

    def per_row(self, columns: int, column_offset: int = 0) -> int:
        """Bytes of state per row of a shard with these columns."""
        # Counted on every device, although some have no kernel that makes up for missed steps.
        counts_steps = is_replayable(self.settings)
        own = _state_bytes(self.settings, columns, column_offset, self.dim)
        return own + _STEP_COUNTER * counts_steps

    @property
    def values_per_row(self) -> int:
        """Values per row that ranks sum if they share its columns; see `Measured`."""
        clipped = self.settings.clip.columns
        rest = 2 if clipped is not None and clipped < self.dim else 1
        return 3 + rest * len(self.settings.rule.row_states)


@lru_cache(maxsize=256)
def _state_bytes(settings: UpdateSettings, columns: int, column_offset: int, dim: int) -> int:
    """Measured on a table of one row."""
    shard = TableShard("planned", 1, column_offset=column_offset)
    array = TableArray.create([shard], torch.zeros(1, columns), settings, dim)
    return sum(state.nbytes for state in array.states.values())


@dataclass(frozen=True)
class Workload:
    """A step of training.

    Attributes:
        states: of the tables' optimizers, by name of the table.
        dense_bytes_per_sample: activations of the dense layers.
        batch_size: global.
        reproducible: whether the bits may not depend on the number of ranks.
        keeps_mean: whether the devices hold a copy of all weights, see `EpochMean`.
    """

    data: PlannedData
    states: Mapping[str, TableStates]
    dense_parameters: int
    dense_bytes_per_sample: int
    batch_size: int
    world_size: int
    reproducible: bool = False
    keeps_mean: bool = False

    @property
    def local_batch_size(self) -> int:
        """Samples of a rank."""
        return self.batch_size // self.world_size

    @cached_property
    def tables(self) -> dict[str, PlannedTable]:
        """Tables by name."""
        return {table_name(table.field): table for table in self.data.tables}

    def placed_shards(self, plan: ShardingPlan) -> Iterator[PlacedShard]:
        """Every shard of a plan."""
        for table, sharding in (each for module in plan.plan.values() for each in module.items()):
            kind = sharding.sharding_type
            if sharding.sharding_spec is None:
                for rank in range(self.world_size):
                    rows, columns = self.tables[table].rows, self.states[table].dim
                    yield PlacedShard(table, kind, rank, 0, rows, 0, columns)
                continue
            for shard in sharding.sharding_spec.shards:
                (row, column), (rows, columns) = shard.shard_offsets, shard.shard_sizes
                yield PlacedShard(table, kind, shard.placement.rank(), row, rows, column, columns)

    def weight_bytes(self, shard: PlacedShard) -> int:
        """Weights of a shard."""
        return shard.rows * shard.columns * FLOAT

    def mean_bytes(self, weights: int) -> int:
        """Bytes of the mean of so many bytes of weights."""
        return weights if self.keeps_mean else 0

    def state_bytes(self, shard: PlacedShard) -> int:
        """Optimizer state of a shard."""
        states = self.states[shard.table]
        return shard.rows * states.per_row(shard.columns, shard.column_offset)

    def lookups(self, shard: PlacedShard) -> float:
        """Expected ids of a step that are looked up in a shard."""
        table = self.tables[shard.table]
        if shard.is_replicated:
            return self.local_batch_size * table.ids_per_sample
        share = table.below(shard.row_offset + shard.rows) - table.below(shard.row_offset)
        return self.batch_size * table.ids_per_sample * share

    def activation_bytes(self, shard: PlacedShard) -> int:
        """Bytes that a step allocates for a shard: received ids, lookup output, update."""
        lookups, states = self.lookups(shard), self.states[shard.table]
        samples = self.local_batch_size if shard.is_replicated else self.batch_size
        # A bag of each field.
        samples *= len(self.tables[shard.table].ids_of_fields)
        # Ids and lengths as they arrive, and again in the order of the tables.
        per_id = self.data.id_bytes + FLOAT * bool(self.data.weighted)
        received = 0 if shard.is_replicated else 2 * (lookups * per_id + samples * INT)
        row = shard.columns * FLOAT
        # Of each bag, or of each id, with its gradient.
        is_apart = self.data.has_rows_apart(self.tables[shard.table].field)
        output = 2 * (lookups if is_apart else samples) * row
        # Gradient, weights and states of the rows.
        of_rows = 2 * row + states.per_row(shard.columns, shard.column_offset)
        of_rows += 2 * LONG + states.values_per_row * FLOAT
        # A step changes no more rows than it looks up.
        update = lookups * _SORTING + min(lookups, shard.rows) * of_rows
        if states.settings.rule.is_frozen:
            update = 0
        if states.settings.needs_all_rows:
            update += shard.rows * states.values_per_row * FLOAT
        return round(received + output + update)

    def shard_bytes(self, shard: PlacedShard) -> int:
        """All bytes of a shard."""
        weights = self.weight_bytes(shard)
        rest = self.state_bytes(shard) + self.activation_bytes(shard)
        return weights + self.mean_bytes(weights) + rest

    def common_activation_bytes(self) -> int:
        """Bytes that a step allocates on every rank, wherever the tables are."""
        batch, data, fields = self.local_batch_size, self.data, len(self.data.vocabulary_sizes)
        per_id = data.id_bytes + FLOAT * bool(data.weighted)
        ids = sum(t.ids_per_sample for t in data.tables) * per_id + fields * INT
        # The batch, its ids sorted by destination, label and weight.
        inputs = batch * (2 * ids + (data.numbers + 2) * FLOAT)
        table_of = {f: data.shared.get(f, f) for f in data.vocabulary_sizes}
        widths = {field: self.states[table_name(table)].dim for field, table in table_of.items()}
        # Embeddings as they arrive, in the order of the fields, and their gradient.
        pooled = 3 * batch * sum(widths.values()) * FLOAT
        # And both again, divided by the number of ids.
        pooled += 2 * batch * sum(widths.values()) * FLOAT if data.mean else 0
        # Of each id of a history as it arrives, as the model reads it, and its gradient.
        ids_of = data.ids_of_histories().items()
        pooled += 3 * batch * sum(mean * widths[field] for field, mean in ids_of) * FLOAT
        layers = batch * self.dense_bytes_per_sample
        # Gradients, and the buckets that they are summed in.
        gradients = 2 * self.dense_weight_bytes()
        return round(inputs + pooled + layers + gradients)

    def dense_weight_bytes(self) -> int:
        """Weights of the dense layers, which every rank copies."""
        return self.dense_parameters * FLOAT

    def dense_state_bytes(self) -> int:
        """Adam's two moments of the dense layers."""
        return 2 * self.dense_weight_bytes()

    def table_bytes(self) -> int:
        """Weights, their mean, and states of all tables together."""
        states = [(self.states[name], table.rows) for name, table in self.tables.items()]
        weights = sum(rows * one.dim * FLOAT for one, rows in states)
        of_states = sum(rows * one.per_row(one.dim) for one, rows in states)
        return weights + self.mean_bytes(weights) + of_states

    def even_bytes(self) -> float:
        """Bytes that a rank needs if the tables are divided evenly."""
        return self.table_bytes() / self.world_size + self.common_bytes()

    def common_bytes(self) -> int:
        """Bytes that every rank needs under any plan."""
        weights = self.dense_weight_bytes()
        rest = self.dense_state_bytes() + self.common_activation_bytes()
        return weights + self.mean_bytes(weights) + rest


def workload(
    config: Config, data: PlannedData, model: CTRModel, world_size: int, device_type: str
) -> Workload:
    """The step that a configuration describes.

    Args:
        model: built from it, its tables on `meta`.
        device_type: `cuda` or `cpu`.
    """
    of_tables = {id(parameter) for parameter in model.front.parameters()}
    return Workload(
        data,
        TableStates.of_tables(config, model.front),
        sum(p.numel() for p in model.parameters() if id(p) not in of_tables),
        activation_bytes_per_sample(model, data.ids_of_histories()),
        config.train.batch_size,
        world_size,
        config.train.reproducible,
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
