"""What a step of training takes: the tables, how often their rows are looked up, and bytes.

Weights and states are exact. Activations are estimates on the safe side: the tensors of a step as
if all were alive together, and each as large as it can be. Steps on a CPU took a third to two
thirds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torchrec.distributed.types import ShardingPlan, ShardingType

from stampede.data import Dataset, SyntheticClicks
from stampede.data.prepared.reader import open_prepared
from stampede.data.synthetic import NUMBERS
from stampede.engine.config import Config
from stampede.engine.config.data import SizesSection, SyntheticSection
from stampede.engine.planning.memory import FLOAT, TableStates, activation_bytes_per_sample
from stampede.engine.reading import data_folder
from stampede.models import CTRModel, table_name
from stampede.settings import SettingsError

LONG = 8
# Of the lengths of bags.
INT = 4

# Bytes for each id that is looked up, besides the id: summing by row makes its row and bag, and a
# sort with its order (see `sum_by_row`), all int64.
_SORTING = 5 * LONG

# Rows of the training part that are looked at: so many stretches of so many rows.
_STRETCHES, _STRETCH = 64, 1024


@dataclass(frozen=True)
class PlannedTable:
    """The table of an id field.

    Attributes:
        field: its name.
        rows: of the table.
        ids_per_sample: mean number of ids.
        below: share of the lookups that go to rows `0 .. row - 1`.
    """

    field: str
    rows: int
    ids_per_sample: float
    below: Callable[[int], float]


@dataclass(frozen=True)
class PlannedData:
    """What a plan must know of the data.

    Attributes:
        tables: in the order of the fields.
        numbers: numeric inputs.
        id_bytes: bytes of an id in a batch.
        assumed: how often rows are looked up, in words.
        rows: of the training part; None where only sizes of tables are known.
    """

    tables: tuple[PlannedTable, ...]
    numbers: int
    id_bytes: int
    assumed: str
    rows: int | None = None

    @property
    def vocabulary_sizes(self) -> dict[str, int]:
        """Rows by field."""
        return {table.field: table.rows for table in self.tables}


@dataclass(frozen=True)
class PlacedShard:
    """A table, or a part of one, on a rank.

    Attributes:
        table: its name.
        sharding_type: TorchRec's.
        rank: that holds it.
        row_offset, rows, column_offset, columns: which part of the table it is.
    """

    table: str
    sharding_type: str
    rank: int
    row_offset: int
    rows: int
    column_offset: int
    columns: int

    @property
    def is_replicated(self) -> bool:
        """Whether every rank has a copy, and looks up its own part of the batch only."""
        return self.sharding_type == ShardingType.DATA_PARALLEL.value


def placed_shards(
    plan: ShardingPlan, shapes: dict[str, tuple[int, int]], world_size: int
) -> Iterator[PlacedShard]:
    """Every part of every table.

    Args:
        shapes: rows and columns of the tables, by name.
    """
    for module in plan.plan.values():
        for table, sharding in module.items():
            kind = sharding.sharding_type
            if sharding.sharding_spec is None:
                rows, columns = shapes[table]
                for rank in range(world_size):
                    yield PlacedShard(table, kind, rank, 0, rows, 0, columns)
                continue
            for shard in sharding.sharding_spec.shards:
                (first_row, first_column), (rows, columns) = shard.shard_offsets, shard.shard_sizes
                rank = shard.placement.rank()
                yield PlacedShard(table, kind, rank, first_row, rows, first_column, columns)


@dataclass(frozen=True)
class Workload:
    """A step of training, on so many ranks.

    Attributes:
        data: its tables.
        columns: stored columns of a row.
        states: of the tables' optimizer.
        dense_parameters: number of parameters of the layers that every rank has a copy of.
        dense_bytes_per_sample: what these keep for a sample in forward and backward.
        batch_size: global batch.
        world_size: number of ranks.
        passes: forward and backward passes of a step.
        bytes_on_the_way: of a number of an embedding, and of its gradient, between two ranks.
    """

    data: PlannedData
    columns: int
    states: TableStates
    dense_parameters: int
    dense_bytes_per_sample: int
    batch_size: int
    world_size: int
    passes: int = 1
    bytes_on_the_way: tuple[int, int] = (FLOAT, FLOAT)

    @property
    def local_batch_size(self) -> int:
        """Samples of a rank."""
        return self.batch_size // self.world_size

    @cached_property
    def tables(self) -> dict[str, PlannedTable]:
        """By name."""
        return {table_name(table.field): table for table in self.data.tables}

    @property
    def shapes(self) -> dict[str, tuple[int, int]]:
        """Rows and columns of the tables, by name."""
        return {name: (table.rows, self.columns) for name, table in self.tables.items()}

    def weight_bytes(self, shard: PlacedShard) -> int:
        """Of the part of a table."""
        return shard.rows * shard.columns * FLOAT

    def state_bytes(self, shard: PlacedShard) -> int:
        """Of its optimizer."""
        return shard.rows * self.states.per_row(shard.columns, shard.column_offset)

    def lookups(self, shard: PlacedShard) -> float:
        """Ids of a step that are looked up in it, in expectation."""
        table = self.tables[shard.table]
        if shard.is_replicated:
            return self.local_batch_size * table.ids_per_sample
        share = table.below(shard.row_offset + shard.rows) - table.below(shard.row_offset)
        return self.batch_size * table.ids_per_sample * share

    def distinct_rows(self, shard: PlacedShard) -> float:
        """Rows of it that a step changes, at most."""
        return min(self.lookups(shard), shard.rows)

    def activation_bytes(self, shard: PlacedShard) -> int:
        """What a step makes for it: ids as they come, the lookup's output, the update."""
        lookups = self.lookups(shard)
        samples = self.local_batch_size if shard.is_replicated else self.batch_size
        # Ids and lengths come once, and once more in the order of the tables.
        received = 0 if shard.is_replicated else 2 * (lookups * self.data.id_bytes + samples * INT)
        # With its gradient.
        output = 2 * samples * shard.columns * FLOAT
        row = shard.columns * FLOAT
        # Gradient and weights of the rows, once more in Helen's first pass; their states.
        of_rows = (2 * self.passes) * row + self.states.per_row(shard.columns, shard.column_offset)
        of_rows += 2 * LONG + self.states.values_per_row * FLOAT
        update = lookups * _SORTING + self.distinct_rows(shard) * of_rows
        if self.states.needs_all_rows:
            update += shard.rows * self.states.values_per_row * FLOAT
        return round(received + output + update)

    def common_activation_bytes(self) -> int:
        """What a step makes on every rank, wherever the tables are."""
        batch, data, fields = self.local_batch_size, self.data, len(self.data.tables)
        ids_per_sample = sum(table.ids_per_sample for table in data.tables)
        ids = ids_per_sample * data.id_bytes + fields * INT
        # The batch, and its ids sorted by the ranks that they go to; label and weight.
        inputs = batch * (2 * ids + (data.numbers + 2) * FLOAT)
        # Embeddings as they come, in the order of the fields, and their gradient.
        pooled = 3 * batch * fields * self.columns * FLOAT
        layers = batch * self.dense_bytes_per_sample
        # Gradients, and the buckets in which DDP adds them up.
        gradients = 2 * self.dense_parameters * FLOAT
        return round(inputs + pooled + layers + gradients)

    def dense_weight_bytes(self) -> int:
        """Of the layers that every rank has a copy of."""
        return self.dense_parameters * FLOAT

    def dense_state_bytes(self) -> int:
        """Adam's two moments of them."""
        return 2 * self.dense_parameters * FLOAT

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
    columns, communication = model.front.columns, config.sharding.communication
    of_tables = {id(parameter) for parameter in model.front.ebc.parameters()}
    return Workload(
        data,
        columns.stored,
        TableStates.of(config, columns.dim, columns.stored),
        sum(p.numel() for p in model.parameters() if id(p) not in of_tables),
        activation_bytes_per_sample(model),
        config.train.batch_size,
        world_size,
        passes(config),
        tuple(
            FLOAT if precision == "fp32" else FLOAT // 2
            for precision in (communication.forward, communication.backward)
        ),
    )


def passes(config: Config) -> int:
    """Forward and backward passes of a step."""
    return 2 if config.optim.embedding.optimizer == "helen" else 1


def planned_data(config: Config, dataset: Dataset | None = None) -> PlannedData:
    """Read from the configuration, or from data that are prepared.

    Args:
        dataset: the data, where they are open; else they are opened if need be.

    Raises:
        SettingsError: they do not tell the size of the tables.
        DataError: a file cannot be used.
    """
    section = config.data
    if isinstance(section, SyntheticSection):
        clicks = SyntheticClicks(seed=section.seed, scale=section.scale, zipf=section.zipf)
        sizes = {f"C{i + 1}": rows for i, rows in enumerate(clicks.cardinalities())}
        return _drawn(sizes, {}, section.zipf, NUMBERS, 8, section.rows)
    if not isinstance(section, SizesSection):
        return _sampled(open_prepared(data_folder(config)) if dataset is None else dataset)
    if not section.tables:
        raise SettingsError(
            "data.tables is not given; write the rows of each id field's table, such as "
            "data.tables='{user: 1e9, item: 2e7}'"
        )
    unknown = sorted(set(section.ids_per_sample) - set(section.tables))
    if unknown:
        raise SettingsError(
            f"data.ids_per_sample: {unknown[0]!r} is no field of data.tables; these are "
            f"{', '.join(section.tables)}"
        )
    id_bytes = 4 if max(section.tables.values()) < 2**31 else 8
    return _drawn(section.tables, section.ids_per_sample, section.zipf, section.numbers, id_bytes)


def uniform(rows: int) -> Callable[[int], float]:
    """`PlannedTable.below` where rows are looked up equally often, as hashed ids nearly are."""
    return lambda row: row / rows


def zipf(rows: int, exponent: float) -> Callable[[int], float]:
    """`PlannedTable.below` where row `i` gets the integral of `x^-exponent` over `[i+1, i+2)`.

    That is how synthetic clicks are drawn; preparation, too, puts the most frequent ids first.
    """
    power = 1.0 - exponent
    return lambda row: (1.0 - (row + 1.0) ** power) / (1.0 - (rows + 1.0) ** power)


def sampled(ids: np.ndarray) -> Callable[[int], float]:
    """`PlannedTable.below` as in a sample of at least one id."""
    ids = np.sort(ids)
    return lambda row: float(np.searchsorted(ids, row)) / len(ids)


def _drawn(
    sizes: dict[str, int],
    ids_per_sample: dict[str, float],
    exponent: float | None,
    numbers: int,
    id_bytes: int,
    rows: int | None = None,
) -> PlannedData:
    tables = tuple(
        PlannedTable(
            field,
            size,
            ids_per_sample.get(field, 1.0),
            uniform(size) if exponent is None else zipf(size, exponent),
        )
        for field, size in sizes.items()
    )
    assumed = "every row of a table equally often"
    if exponent is not None:
        assumed = f"Zipf with exponent {exponent:g}, the most frequent id first"
    return PlannedData(tables, numbers, id_bytes, assumed, rows)


def _sampled(dataset: Dataset) -> PlannedData:
    rows = torch.from_numpy(_stretches(dataset.train.rows)).to(dataset.train.device)
    samples = dataset.train.read(rows)
    ids_of = [*samples.ids.T, *(bag.values for bag in samples.bags)]
    tables = []
    for (field, size), of in zip(dataset.vocabulary_sizes.items(), ids_of, strict=True):
        below = sampled(of.cpu().numpy()) if len(of) else uniform(size)
        tables.append(PlannedTable(field, size, len(of) / len(rows), below))
    assumed = f"as in {len(rows):,} rows of the training part"
    return PlannedData(
        tuple(tables), dataset.numbers, samples.ids.element_size(), assumed, dataset.train.rows
    )


def _stretches(rows: int) -> np.ndarray:
    """Evenly spaced stretches of rows; all where there are not more."""
    if rows <= _STRETCHES * _STRETCH:
        return np.arange(rows)
    starts = np.linspace(0, rows - _STRETCH, _STRETCHES).astype(np.int64)
    return (starts[:, None] + np.arange(_STRETCH)).ravel()
