"""The tables of a plan: their sizes, and how often their rows are looked up."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from stampede.data import Dataset
from stampede.data.samples import sampled_rows
from stampede.data.synthetic import GOALS, NUMBERS
from stampede.engine.config import Config
from stampede.engine.config.data import SizesSection, SyntheticSection
from stampede.models.embedding_front import fields_of_tables
from stampede.settings import SettingsError


@dataclass(frozen=True)
class PlannedTable:
    """A table.

    Attributes:
        field: whose own it is.
        ids_of_fields: mean ids per sample of each field that uses it.
        below: maps a row to the share of lookups that go to rows before it.
        has_bags: whether a sample may have any number of ids of a field.
    """

    field: str
    rows: int
    ids_of_fields: tuple[float, ...]
    below: Callable[[int], float]
    has_bags: bool = False

    @property
    def ids_per_sample(self) -> float:
        """Mean ids per sample of all fields together."""
        return sum(self.ids_of_fields)


@dataclass(frozen=True)
class PlannedData:
    """What a plan needs to know about the data.

    Attributes:
        vocabulary_sizes, numbers, shared, mean, weighted, attention, sequences, goals: as of a
            `Dataset`.
        tables: in the order of the fields.
        assumed: how often rows are looked up, in words.
        rows: of the training part; None if only table sizes are known.
    """

    vocabulary_sizes: Mapping[str, int]
    numbers: int
    shared: Mapping[str, str]
    tables: tuple[PlannedTable, ...]
    id_bytes: int
    assumed: str
    rows: int | None = None
    mean: tuple[str, ...] = ()
    weighted: tuple[str, ...] = ()
    goals: tuple[str, ...] = ()
    attention: Mapping[str, str] = field(default_factory=dict)
    sequences: Mapping[str, str] = field(default_factory=dict)

    def ids_of_histories(self) -> dict[str, float]:
        """Mean ids per sample of the fields whose rows are looked up one by one."""
        fields = fields_of_tables(self.vocabulary_sizes, self.shared)
        ids = {
            field: mean
            for table in self.tables
            for field, mean in zip(fields[table.field], table.ids_of_fields, strict=True)
        }
        return {field: ids[field] for field in (*self.attention, *self.sequences)}

    def has_rows_apart(self, table: str) -> bool:
        """Whether the rows of a table are looked up one by one."""
        histories = (*self.attention, *self.sequences)
        return any(self.shared.get(field, field) == table for field in histories)


def planned_data(config: Config, dataset: Dataset | None = None) -> PlannedData:
    """Sizes and frequencies.

    Args:
        dataset: if it is open; needed if only prepared data know them.

    Raises:
        SettingsError: the sizes of the tables are not given, or do not fit together.
        DataError: a file cannot be used.
    """
    section = config.data
    if isinstance(section, SizesSection):
        return _of_sizes(section)
    if not isinstance(section, SyntheticSection):
        return _from_sample(dataset)
    clicks = section.clicks()
    if section.histories:
        return _from_sample(clicks.dataset(section.rows, section.test_rows))
    sizes = {f"C{i + 1}": rows for i, rows in enumerate(clicks.cardinalities())}
    sizes = sizes if dataset is None else dataset.vocabulary_sizes
    planned = _from_sizes(sizes, {}, {}, section.zipf, NUMBERS, 8, section.rows)
    return replace(planned, goals=GOALS if section.conversions else ())


def _of_sizes(section: SizesSection) -> PlannedData:
    """Tables without clicks; a SettingsError if their fields do not fit together."""
    if not section.tables:
        raise SettingsError(
            "data.tables is not given; write the rows of each id field's table, such as "
            "data.tables='{user: 1e9, item: 2e7}'"
        )
    fields, kinds = [*section.tables, *section.share], ("attention", "sequences")
    histories = {**section.attention, **section.sequences}
    queries = [field for field in fields if field not in histories]
    what = "a field of data.tables", "a field that is no history"
    for key, named, known in (
        ("ids_per_sample", section.ids_per_sample, fields),
        ("share", section.share.values(), section.tables),
        *((kind, getattr(section, kind), fields) for kind in kinds),
        *((kind, getattr(section, kind).values(), queries) for kind in kinds),
    ):
        unknown = [field for field in named if field not in known]
        if unknown:
            raise SettingsError(
                f"data.{key}: {unknown[0]!r} is not {what[known is queries]}; write one of "
                f"{', '.join(known)}"
            )
    twice = [field for field in section.share if field in section.tables]
    if twice:
        raise SettingsError(
            f"data.share: {twice[0]!r} has a table of its own in data.tables; write it in one of "
            "them only"
        )
    sizes = section.tables | {field: section.tables[of] for field, of in section.share.items()}
    id_bytes = 4 if max(sizes.values()) < 2**31 else 8
    ids, numbers = section.ids_per_sample, section.numbers
    planned = _from_sizes(sizes, section.share, ids, section.zipf, numbers, id_bytes)
    found = {kind: getattr(section, kind) for kind in kinds}
    return replace(planned, goals=tuple(section.goals), **found)


def zipf(rows: int, exponent: float) -> Callable[[int], float]:
    """`PlannedTable.below` if row `i` gets the integral of `x^-exponent` over `[i+1, i+2)`.

    Synthetic clicks are drawn like this; preparation also puts the most frequent ids first. With an
    exponent of 0 rows are equally frequent, as hashed ids nearly are.
    """
    power = 1.0 - exponent
    return lambda row: (1.0 - (row + 1.0) ** power) / (1.0 - (rows + 1.0) ** power)


def sampled(ids: np.ndarray) -> Callable[[int], float]:
    """`PlannedTable.below` as in a sample of at least one id."""
    ids = np.sort(ids)
    return lambda row: float(np.searchsorted(ids, row)) / len(ids)


def _from_sizes(
    sizes: Mapping[str, int],
    shared: Mapping[str, str],
    ids_per_sample: Mapping[str, float],
    exponent: float | None,
    numbers: int,
    id_bytes: int,
    rows: int | None = None,
) -> PlannedData:
    assumed = "every row of a table equally often"
    if exponent is not None:
        assumed = f"Zipf with exponent {exponent:g}, the most frequent id first"
    tables = []
    for table, fields in fields_of_tables(sizes, shared).items():
        ids = tuple(ids_per_sample.get(field, 1.0) for field in fields)
        has_bags = any(field in ids_per_sample for field in fields)
        below = zipf(sizes[table], exponent or 0.0)
        tables.append(PlannedTable(table, sizes[table], ids, below, has_bags))
    return PlannedData(sizes, numbers, shared, tuple(tables), id_bytes, assumed, rows)


def _from_sample(dataset: Dataset) -> PlannedData:
    rows = torch.from_numpy(sampled_rows(dataset.train.rows)).to(dataset.train.device)
    samples = dataset.train.read(rows)
    sizes, shared = dataset.vocabulary_sizes, dataset.shared
    columns = [*samples.ids.T, *(bag.values for bag in samples.bags)]
    ids_of = {n: ids.cpu().numpy() for n, ids in zip(sizes, columns, strict=True)}
    tables = []
    for table, fields in fields_of_tables(sizes, shared).items():
        ids = [ids_of[field] for field in fields]
        together = np.concatenate(ids)
        below = sampled(together) if len(together) else zipf(sizes[table], 0.0)
        means = tuple(len(some) / len(rows) for some in ids)
        has_bags = any(field in dataset.multi for field in fields)
        tables.append(PlannedTable(table, sizes[table], means, below, has_bags))
    assumed = f"as in {len(rows):,} rows of the training part"
    id_bytes, trained = samples.ids.element_size(), dataset.train.rows
    given = sizes, dataset.numbers, shared, tuple(tables), id_bytes, assumed, trained
    kinds = {"attention": dataset.attention, "sequences": dataset.sequences}
    kinds |= {"mean": dataset.mean, "weighted": dataset.weighted}
    return PlannedData(*given, goals=dataset.goals, **kinds)
