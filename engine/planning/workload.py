"""What the parts of tables and the rest of the model take on a rank: bytes and lookups.

Weights and states are exact. Activations are estimates on the safe side: the tensors of a step as
if all were alive together, and each as large as it can be. Steps on a CPU took a third to two
thirds.
"""

from __future__ import annotations

from dataclasses import dataclass

from stampede.engine.config import Config
from stampede.engine.planning.activations import activation_bytes_per_sample
from stampede.engine.planning.shards import PlacedShard
from stampede.engine.planning.states import FLOAT, TableStates, table_states
from stampede.engine.planning.tables import PlannedData, PlannedTable
from stampede.models import CTRModel, table_name

LONG = 8
# Of the lengths of bags.
INT = 4

# Bytes for each id that is looked up, besides the id: summing by row makes its row and bag, and a
# sort with its order (see `sum_by_row`), all int64.
_SORTING = 5 * LONG


@dataclass(frozen=True)
class DenseLayers:
    """The layers that every rank has a copy of.

    Attributes:
        parameters: their number.
        bytes_per_sample: what they keep in memory for a sample in forward and backward.
    """

    parameters: int
    bytes_per_sample: int


@dataclass(frozen=True)
class Workload:
    """A step of training, on so many ranks.

    Attributes:
        data: its tables.
        columns: stored columns of a row.
        states: of the tables' optimizer.
        dense: the other layers.
        batch_size: global batch.
        world_size: number of ranks.
        passes: forward and backward passes of a step.
    """

    data: PlannedData
    columns: int
    states: TableStates
    dense: DenseLayers
    batch_size: int
    world_size: int
    passes: int = 1

    @property
    def local_batch_size(self) -> int:
        """Samples of a rank."""
        return self.batch_size // self.world_size

    @property
    def tables(self) -> dict[str, PlannedTable]:
        """By name."""
        return {table_name(table.field): table for table in self.data.tables}

    @property
    def shapes(self) -> dict[str, tuple[int, int]]:
        """Rows and columns of the tables, by name."""
        return {name: (table.rows, self.columns) for name, table in self.tables.items()}

    @property
    def ids_per_sample(self) -> float:
        """Over all fields."""
        return sum(table.ids_per_sample for table in self.data.tables)

    def weight_bytes(self, shard: PlacedShard) -> int:
        """Of the part of a table."""
        return shard.rows * shard.columns * FLOAT

    def state_bytes(self, shard: PlacedShard) -> int:
        """Of its optimizer."""
        return shard.rows * self.states.per_row(shard.columns, shard.column_offset)

    def lookups(self, shard: PlacedShard, table: PlannedTable) -> float:
        """Ids of a step that are looked up in it, in expectation."""
        if shard.is_replicated:
            return self.local_batch_size * table.ids_per_sample
        below = table.frequencies.below
        share = below(shard.row_offset + shard.rows) - below(shard.row_offset)
        return self.batch_size * table.ids_per_sample * share

    def distinct_rows(self, shard: PlacedShard, table: PlannedTable) -> float:
        """Rows of it that a step changes, at most."""
        return min(self.lookups(shard, table), shard.rows)

    def activation_bytes(self, shard: PlacedShard, table: PlannedTable) -> int:
        """What a step makes for it: ids as they come, the lookup's output, the update."""
        lookups = self.lookups(shard, table)
        samples = self.local_batch_size if shard.is_replicated else self.batch_size
        # Ids and lengths come once, and once more in the order of the tables.
        received = 0 if shard.is_replicated else 2 * (lookups * self.data.id_bytes + samples * INT)
        # With its gradient.
        output = 2 * samples * shard.columns * FLOAT
        row = shard.columns * FLOAT
        # Gradient and weights of the rows, once more in Helen's first pass; their states.
        of_rows = (2 * self.passes) * row + self.states.per_row(shard.columns, shard.column_offset)
        of_rows += 2 * LONG + self.states.values_per_row * FLOAT
        update = lookups * _SORTING + self.distinct_rows(shard, table) * of_rows
        if self.states.needs_all_rows:
            update += shard.rows * self.states.values_per_row * FLOAT
        return round(received + output + update)

    def common_activation_bytes(self) -> int:
        """What a step makes on every rank, wherever the tables are."""
        batch, data, fields = self.local_batch_size, self.data, len(self.data.tables)
        ids = self.ids_per_sample * data.id_bytes + fields * INT
        # The batch, and its ids sorted by the ranks that they go to; label and weight.
        inputs = batch * (2 * ids + (data.numbers + 2) * FLOAT)
        # Embeddings as they come, in the order of the fields, and their gradient.
        pooled = 3 * batch * fields * self.columns * FLOAT
        layers = batch * self.dense.bytes_per_sample
        # Gradients, and the buckets in which DDP adds them up.
        gradients = 2 * self.dense.parameters * FLOAT
        return round(inputs + pooled + layers + gradients)

    def dense_weight_bytes(self) -> int:
        """Of the layers that every rank has a copy of."""
        return self.dense.parameters * FLOAT

    def dense_state_bytes(self) -> int:
        """Adam's two moments of them."""
        return 2 * self.dense.parameters * FLOAT

    def table_bytes(self) -> int:
        """Weights and states of all tables, undivided."""
        row = self.columns * FLOAT + self.states.per_row(self.columns)
        return sum(table.rows for table in self.data.tables) * row

    def even_bytes(self) -> float:
        """What a rank needs at least where tables are divided evenly."""
        return self.table_bytes() / self.world_size + self.common_bytes()

    def common_bytes(self) -> int:
        """All that is the same on every rank."""
        return self.dense_weight_bytes() + self.dense_state_bytes() + self.common_activation_bytes()


def workload(config: Config, data: PlannedData, model: CTRModel, world_size: int) -> Workload:
    """The step that a configuration describes.

    Args:
        model: built from it, its tables on `meta`.
    """
    columns = model.front.columns
    of_tables = {id(parameter) for parameter in model.front.ebc.parameters()}
    parameters = sum(p.numel() for p in model.parameters() if id(p) not in of_tables)
    dense = DenseLayers(parameters, activation_bytes_per_sample(model))
    return Workload(
        data,
        columns.stored,
        table_states(config, columns.dim, columns.stored),
        dense,
        config.train.batch_size,
        world_size,
        passes(config),
    )


def passes(config: Config) -> int:
    """Forward and backward passes of a step."""
    return 2 if config.optim.embedding.optimizer == "helen" else 1
