"""The tables of a plan: their sizes, and how many ids a sample has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from stampede.data import Dataset, open_prepared
from stampede.data.samples import sampled_rows
from stampede.data.synthetic import GOALS, NUMBERS
from stampede.engine.config import Config
from stampede.engine.config.data import SizesSection, SyntheticSection
from stampede.engine.reading import data_folder
from stampede.models.embedding_front import fields_of_tables
from stampede.settings import SettingsError


@dataclass(frozen=True)
class PlannedData:
    """What a plan needs to know about the data.

    Attributes:
        vocabulary_sizes, numbers, shared, mean, weighted, attention, sequences, goals: as of a
            `Dataset`.
        ids_per_sample: mean ids per sample of the fields that may have several.
        rows: of the training part; None if only table sizes are known.
    """

    vocabulary_sizes: Mapping[str, int]
    numbers: int
    rows: int | None = None
    ids_per_sample: Mapping[str, float] = field(default_factory=dict)
    shared: Mapping[str, str] = field(default_factory=dict)
    mean: Sequence[str] = ()
    weighted: Sequence[str] = ()
    goals: Sequence[str] = ()
    attention: Mapping[str, str] = field(default_factory=dict)
    sequences: Mapping[str, str] = field(default_factory=dict)

    @property
    def tables(self) -> dict[str, list[str]]:
        """The fields that use each table, by the field whose own it is."""
        return fields_of_tables(self.vocabulary_sizes, self.shared)

    def ids_of(self, fields: Sequence[str]) -> list[float]:
        """Mean ids per sample of each of these fields."""
        return [self.ids_per_sample.get(field, 1.0) for field in fields]

    def ids_of_histories(self) -> dict[str, float]:
        """Mean ids per sample of the fields whose rows are looked up one by one."""
        histories = [*self.attention, *self.sequences]
        return dict(zip(histories, self.ids_of(histories), strict=True))


def planned_data(config: Config, dataset: Dataset | None = None) -> PlannedData:
    """What a configuration says about the data, or else the data say.

    Args:
        dataset: if it is open. Synthetic clicks are not drawn for a plan.

    Raises:
        SettingsError: the sizes of the tables are not given, or do not fit together.
        DataError: a file cannot be used.
    """
    section = config.data
    if isinstance(section, SizesSection):
        return _of_sizes(section)
    if dataset is None and isinstance(section, SyntheticSection):
        clicks = section.clicks()
        if section.histories:
            return _of_dataset(clicks.dataset(section.rows, section.test_rows))
        sizes = {f"C{i + 1}": rows for i, rows in enumerate(clicks.cardinalities())}
        goals = GOALS if section.conversions else ()
        return PlannedData(sizes, NUMBERS, section.rows, goals=goals)
    return _of_dataset(dataset or open_prepared(data_folder(config)))


def _of_dataset(dataset: Dataset) -> PlannedData:
    ids = {}
    if dataset.multi:
        rows = torch.from_numpy(sampled_rows(dataset.train.rows)).to(dataset.train.device)
        bags = dataset.train.read(rows).bags
        pairs = zip(dataset.multi, bags, strict=True)
        ids = {field: len(bag.values) / len(rows) for field, bag in pairs}
    return PlannedData(
        dataset.vocabulary_sizes,
        dataset.numbers,
        dataset.train.rows,
        ids,
        dataset.shared,
        dataset.mean,
        dataset.weighted,
        dataset.goals,
        dataset.attention,
        dataset.sequences,
    )


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
    return PlannedData(
        section.tables | {field: section.tables[of] for field, of in section.share.items()},
        section.numbers,
        ids_per_sample=section.ids_per_sample,
        shared=section.share,
        goals=section.goals,
        attention=section.attention,
        sequences=section.sequences,
    )
