"""The id fields that a plan is made for: their sizes, and how often they are looked up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from stampede.data import Dataset, SyntheticClicks
from stampede.data.prepared.reader import open_prepared
from stampede.data.synthetic import NUMBERS
from stampede.engine.config import Config
from stampede.engine.config.data import SizesSection, SyntheticSection
from stampede.engine.planning.frequencies import Frequencies, Sampled, Uniform, Zipf
from stampede.engine.reading import data_folder
from stampede.settings import SettingsError

# Rows of the training part that are looked at: so many stretches of so many rows.
_STRETCHES, _STRETCH = 64, 1024

_INT32_ROWS = 2**31


@dataclass(frozen=True)
class PlannedTable:
    """The table of an id field.

    Attributes:
        field: its name.
        rows: of the table.
        ids_per_sample: mean number of ids.
        frequencies: of its rows.
    """

    field: str
    rows: int
    ids_per_sample: float
    frequencies: Frequencies


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
        return PlannedData(
            _drawn(sizes, {}, section.zipf), NUMBERS, 8, _zipf_words(section.zipf), section.rows
        )
    if isinstance(section, SizesSection):
        return _given(section)
    return _sampled(open_prepared(data_folder(config)) if dataset is None else dataset)


def _given(section: SizesSection) -> PlannedData:
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
    id_bytes = 4 if max(section.tables.values()) < _INT32_ROWS else 8
    tables = _drawn(section.tables, section.ids_per_sample, section.zipf)
    return PlannedData(tables, section.numbers, id_bytes, _zipf_words(section.zipf))


def _drawn(
    sizes: dict[str, int], ids_per_sample: dict[str, float], zipf: float | None
) -> tuple[PlannedTable, ...]:
    return tuple(
        PlannedTable(
            field,
            rows,
            ids_per_sample.get(field, 1.0),
            Uniform(rows) if zipf is None else Zipf(rows, zipf),
        )
        for field, rows in sizes.items()
    )


def _zipf_words(zipf: float | None) -> str:
    if zipf is None:
        return "every row of a table equally often"
    return f"Zipf with exponent {zipf:g}, the most frequent id first"


def _sampled(dataset: Dataset) -> PlannedData:
    rows = torch.from_numpy(_stretches(dataset.train.rows)).to(dataset.train.device)
    samples = dataset.train.read(rows)
    single = [ids.cpu().numpy() for ids in samples.ids.T]
    bags = [bag.values.cpu().numpy() for bag in samples.bags]
    tables = []
    for (field, size), ids in zip(dataset.vocabulary_sizes.items(), [*single, *bags], strict=True):
        known = Sampled(np.sort(ids)) if len(ids) else Uniform(size)
        tables.append(PlannedTable(field, size, len(ids) / len(rows), known))
    assumed = f"as in {len(rows):,} rows of the training part"
    return PlannedData(
        tuple(tables), dataset.numbers, samples.ids.element_size(), assumed, dataset.train.rows
    )


def _stretches(rows: int) -> np.ndarray:
    """Evenly spaced stretches of rows; all where there are not more."""
    if rows <= _STRETCHES * _STRETCH:
        return np.arange(rows)
    starts: Sequence[int] = np.linspace(0, rows - _STRETCH, _STRETCHES).astype(np.int64)
    return np.concatenate([np.arange(first, first + _STRETCH) for first in starts])
