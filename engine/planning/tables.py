"""The data of a plan: the sizes of their tables, and how many ids a sample has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from stampede.data import Dataset
from stampede.data.samples import sampled_rows
from stampede.data.synthetic import GOALS, NUMBERS
from stampede.engine.config.data import LARGE_LOG, SizesSection, SyntheticSection
from stampede.settings import SettingsError


class _Unread(NamedTuple):
    """A part of which only the number of rows is known."""

    rows: int


def _unread(sizes: Mapping[str, int], numbers: int, rows: int, **more: Any) -> Dataset:
    return Dataset(sizes, numbers, _Unread(rows), None, _Unread(0), **more)


def data_of_sizes(section: SizesSection) -> Dataset:
    """Tables without clicks.

    Raises:
        SettingsError: they are not given, or another key names none of them.
    """
    if not section.tables:
        raise SettingsError(
            "data.tables is not given; write the rows of each id field's table, such as "
            "data.tables='{user: 1e9, item: 2e7}'"
        )
    tables, fields = section.tables, [*section.tables, *section.share]
    histories = {**section.attention, **section.sequences}
    queries = [field for field in fields if field not in histories]
    for key, named, known in (
        ("ids_per_sample", section.ids_per_sample, fields),
        ("share", section.share.values(), tables),
        ("attention", section.attention, fields),
        ("attention", section.attention.values(), queries),
        ("sequences", section.sequences, fields),
        ("sequences", section.sequences.values(), queries),
    ):
        unknown = [field for field in named if field not in known]
        if unknown:
            raise SettingsError(
                f"data.{key}: {unknown[0]!r} is not a field of data.tables"
                f"{' that is no history' * (known is queries)}; write one of {', '.join(known)}"
            )
    for field in section.share.keys() & tables.keys():
        raise SettingsError(f"data.share: {field!r} has a table in data.tables; write one of them")
    return _unread(
        tables | {field: tables[of] for field, of in section.share.items()},
        section.numbers,
        LARGE_LOG,
        shared=section.share,
        goals=tuple(section.goals),
        attention=section.attention,
        sequences=section.sequences,
    )


def synthetic_data(section: SyntheticSection) -> Dataset:
    """Synthetic clicks that are not drawn, unless their histories must be counted."""
    clicks = section.clicks()
    if section.histories:
        return clicks.dataset(section.rows, section.test_rows)
    sizes = {f"C{i + 1}": rows for i, rows in enumerate(clicks.cardinalities())}
    return _unread(sizes, NUMBERS, section.rows, goals=GOALS if section.conversions else ())


def ids_per_sample(dataset: Dataset) -> dict[str, float]:
    """Mean ids per sample of the fields that may have several, from some samples."""
    if not dataset.multi:
        return {}
    rows = torch.from_numpy(sampled_rows(dataset.train.rows)).to(dataset.train.device)
    pairs = zip(dataset.multi, dataset.train.read(rows).bags, strict=True)
    return {field: len(bag.values) / len(rows) for field, bag in pairs}
