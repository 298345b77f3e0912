"""The tables of a plan: their sizes, and how many ids a sample has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from stampede.data import Dataset
from stampede.data.samples import sampled_rows
from stampede.data.synthetic import GOALS, NUMBERS
from stampede.engine.config import Config
from stampede.engine.config.data import LARGE_LOG, SizesSection, SyntheticSection
from stampede.settings import SettingsError


@dataclass(frozen=True)
class PlannedData(Dataset):
    """A data set, perhaps without rows, and how many ids its samples have.

    Attributes:
        ids_per_sample: mean ids per sample of the fields that may have several.
    """

    ids_per_sample: Mapping[str, float] = field(default_factory=dict)

    def ids_of(self, fields: Sequence[str]) -> list[float]:
        """Mean ids per sample of each of these fields."""
        return [self.ids_per_sample.get(field, 1.0) for field in fields]

    def ids_of_histories(self) -> dict[str, float]:
        """Mean ids per sample of the fields whose rows are looked up one by one."""
        histories = [*self.attention, *self.sequences]
        return dict(zip(histories, self.ids_of(histories), strict=True))


class _Unread(NamedTuple):
    """A part of which only the number of rows is known."""

    rows: int


def planned_data(config: Config, dataset: Dataset | None = None) -> PlannedData:
    """What a configuration says about the data, or else the data say.

    Args:
        dataset: if it is open, as prepared data must be. Synthetic clicks are not drawn for a plan.

    Raises:
        SettingsError: the sizes of the tables are not given, or do not fit together.
    """
    section = config.data
    if isinstance(section, SizesSection):
        return _of_sizes(section)
    if dataset is None and isinstance(section, SyntheticSection):
        clicks = section.clicks()
        if not section.histories:
            sizes = {f"C{i + 1}": rows for i, rows in enumerate(clicks.cardinalities())}
            goals = GOALS if section.conversions else ()
            return _unread(sizes, NUMBERS, section.rows, goals=goals)
        dataset = clicks.dataset(section.rows, section.test_rows)
    assert dataset is not None
    ids = {}
    if dataset.multi:
        rows = torch.from_numpy(sampled_rows(dataset.train.rows)).to(dataset.train.device)
        pairs = zip(dataset.multi, dataset.train.read(rows).bags, strict=True)
        ids = {field: len(bag.values) / len(rows) for field, bag in pairs}
    return PlannedData(**vars(dataset), ids_per_sample=ids)


def _unread(sizes: Mapping[str, int], numbers: int, rows: int, **more: Any) -> PlannedData:
    return PlannedData(sizes, numbers, _Unread(rows), None, _Unread(0), **more)


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
    return _unread(
        section.tables | {field: section.tables[of] for field, of in section.share.items()},
        section.numbers,
        LARGE_LOG,
        ids_per_sample=section.ids_per_sample,
        shared=section.share,
        goals=tuple(section.goals),
        attention=section.attention,
        sequences=section.sequences,
    )
