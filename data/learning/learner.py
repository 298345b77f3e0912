"""Learns ids, ranges and quantiles from the training part, in one period or in several."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import polars as pl

from stampede.data.errors import DataError
from stampede.data.learning import COUNT, VALUE
from stampede.data.learning.learned import (
    INDEXES,
    LEARNED,
    REMEDY,
    Learned,
    NumberRange,
    Saved,
    filled_number,
    load,
)
from stampede.data.learning.sorting import Sorting, write_pieces
from stampede.data.learning.value_counts import Distinct, ValueCounts
from stampede.data.learning.vocabulary import (
    KEPT,
    WAITING,
    Grown,
    alike,
    grown,
    nothing_known,
    read_vocabulary,
    vocabulary,
)
from stampede.data.options import GrowthOptions
from stampede.data.parallel import computed_ahead
from stampede.data.schema.features import FEW_RARE, settled
from stampede.data.schema.schema import NumberField, Quantiles, Schema, Vocabulary
from stampede.files import sha256
from stampede.settings import reading


def ranges(chunk: pl.DataFrame, fields: Mapping[str, NumberField]) -> dict[str, NumberRange]:
    """Statistics of the numbers in some rows."""
    if not len(chunk) or not fields:
        return {name: NumberRange() for name in fields}
    found = chunk.lazy().select(
        pl.struct(
            low=filled_number(name, field).min(),
            high=filled_number(name, field).max(),
            mean=filled_number(name, field).mean(),
            squares=filled_number(name, field).var(ddof=0) * len(chunk),
        ).alias(name)
        for name, field in fields.items()
    )
    row = found.collect().row(0, named=True)
    return {name: NumberRange(rows=len(chunk), **row[name]) for name in fields}


def edges_of_quantiles(counts: Iterable[pl.DataFrame], buckets: int, spill: Path) -> list[float]:
    """The largest value of each bucket but the last, of at most `buckets`.

    Up to `buckets` distinct values have a bucket each. Of more, a value that is too frequent for a
    bucket has its own, and the others are divided by their quantiles: exact, equal ones merged. Of
    k, the j-th is the smallest value v such that a share of at least j / k of them is at most v.

    Args:
        counts: tables of `value` and `count` with each value in one of them.
        spill: a folder for what does not fit into memory, empty or not there.
    """
    values = None
    for table in counts:
        values = values or Sorting(spill, {VALUE: False}, table.clear().cast({COUNT: pl.Int64}))
        values.add(table)
    if values is None:
        return []
    # Of equally frequent ones the smaller ones, and which value comes before each.
    total, distinct, last, most_frequent = 0, 0, None, pl.DataFrame()
    for piece in filter(len, values.pieces()):
        total, distinct = total + piece[COUNT].sum(), distinct + len(piece)
        piece = piece.with_columns(before=pl.col(VALUE).shift(fill_value=last))
        last = piece[VALUE][-1]
        most_frequent = pl.concat([most_frequent, piece], how="diagonal")
        most_frequent = most_frequent[np.argsort(-most_frequent[COUNT], kind="stable")[:buckets]]
    if distinct <= buckets:
        found = set(most_frequent[VALUE]) if distinct else set()
    else:
        frequent, found = [], set()
        for value, rows, before in most_frequent.iter_rows():
            around = (found | {value, before}) - {None}
            if rows * (buckets - len(found)) <= total or len(around) >= buckets:
                break
            frequent.append(value)
            found, total = around, total - rows
        k, below = buckets - len(found), 0
        # ceil(j * total / k), in integers.
        needed = np.array([-(-j * total // k) for j in range(1, k)], dtype=np.int64)
        for piece in values.pieces():
            others = piece.filter(~pl.col(VALUE).is_in(frequent))
            up_to = below + others[COUNT].cum_sum().to_numpy()
            due = needed[(needed > below) & (needed <= below + others[COUNT].sum())]
            found |= set(others[VALUE].gather(np.searchsorted(up_to, due)))
            below += others[COUNT].sum()
    shutil.rmtree(spill, ignore_errors=True)
    return [float(edge) for edge in sorted(found) if edge < last]


@dataclass(frozen=True)
class Growth:
    """How the vocabularies of a log grow from period to period."""

    options: GrowthOptions
    folder: Path | None = None  # what was learned up to the previous period
    before: Saved | None = None  # content of its `learned.json`

    @property
    def period(self) -> int:
        """Number of this period, from 1."""
        return 1 if self.before is None else self.before.period + 1

    @property
    def rows_before(self) -> int:
        """Training rows of earlier periods."""
        return 0 if self.before is None else self.before.rows

    def described(self) -> dict[str, Any]:
        """All that the vocabularies depend on besides the rows of this period."""
        files = [] if self.folder is None else sorted(self.folder.iterdir())
        return {
            **{name: getattr(self.options, name) for name in GrowthOptions.model_fields},
            "before": [[file.name, sha256(file)] for file in files],
        }

    def ids_before(self, field: str) -> Grown:
        """A field's ids after the previous period."""
        if self.before is None:
            return nothing_known()
        with reading(self.folder / LEARNED, DataError, REMEDY):
            return Grown(
                read_vocabulary(self.folder / self.before.vocabularies[field], KEPT),
                read_vocabulary(self.folder / self.before.waiting[field], WAITING),
            )


class Measured(NamedTuple):
    """What `Learner` takes of the numbers of some rows."""

    rows: int
    ranges: Mapping[str, NumberRange]
    ranges_of_log1p: Mapping[str, NumberRange]


class Learner:
    """Counts ids and measures numbers.

    Args:
        budget: bytes of counts in memory; more go to the folder `spill`.
        spill: also has files that what is learned uses, see `load`.
        growth: for a log in periods; ranges, quantiles and the settled schema are those of the
            first period.

    Attributes:
        rows: of the training part so far.
        soft_labels: whether some labels are between 0 and 1; set it before saving.
        notes: sentences for the user, once it has saved.
    """

    def __init__(
        self, schema: Schema, budget: int, spill: Path, growth: Growth | None = None
    ) -> None:
        self._schema = schema
        self._growth = growth
        self._before = None if growth is None else growth.before
        kinds = Vocabulary | Quantiles if self._before is None else Vocabulary
        counted = {name: f.share or name for name, f in schema.ids.items() if isinstance(f, kinds)}
        self.counts = ValueCounts(counted, budget, spill)
        self._spill = spill
        self.rows = 0
        self.soft_labels = False
        self.notes: list[str] = []
        self._numbers = schema.numbers if self._before is None else {}
        # Whether these numbers become logarithms is decided when all values are known.
        self._log1p = {
            name: field.model_copy(update={"transform": ["log1p"]})
            for name, field in self._numbers.items()
            if field.transform is None
        }
        self._ranges = {name: NumberRange() for name in self._numbers}
        self._ranges_of_log1p = {name: NumberRange() for name in self._log1p}

    def add(self, frame: pl.DataFrame, distinct: Mapping[str, Distinct]) -> None:
        """Learn from typed rows of the training part, and their other `distinct` columns."""
        self.counts.add(frame, distinct)
        self.merge(self.measured(frame))

    def measured(self, frame: pl.DataFrame) -> Measured:
        """The numbers of some typed rows of the training part."""
        return Measured(len(frame), ranges(frame, self._numbers), ranges(frame, self._log1p))

    def merge(self, found: Measured) -> None:
        """Learn the numbers of the next rows; their order decides the last bits of a mean."""
        self.rows += found.rows
        for seen, new in (
            (self._ranges, found.ranges),
            (self._ranges_of_log1p, found.ranges_of_log1p),
        ):
            for name, one in new.items():
                seen[name] = seen[name].merged(one)

    def save(self, folder: Path) -> Learned:
        """Write what was learned into a new folder, and load it."""
        folder.mkdir(parents=True)
        saved = self._before
        if saved is None:
            # Everything learned except the vocabularies.
            seen = self._ranges
            tails = {n: (seen[n].low, seen[n].high, seen[n].mean) for n in self._log1p}
            schema = settled(self._schema, self.rows, tails)
            chosen = {
                name: found
                for name, found in self._ranges_of_log1p.items()
                if "log1p" in schema.numbers[name].transform
            }
            quantiles = {
                name: edges_of_quantiles(
                    self.counts.tables(name), field.buckets, self._spill / f"sorted-{name}"
                )
                for name, field in schema.ids.items()
                if isinstance(field, Quantiles)
            }
            saved = Saved(
                schema_=schema, ranges={**seen, **chosen}, quantiles=quantiles, vocabularies={}
            )
        ids = saved.schema_.ids
        tables = {n: field.share or n for n, field in ids.items() if isinstance(field, Vocabulary)}
        files = {name: f"{table}.parquet" for name, table in tables.items()}
        waiting = {name: f"{table}.waiting.parquet" for name, table in tables.items()}
        with_rare_ids: set[str] = set()

        def write_vocabulary(name: str) -> list[str]:
            field, counts, file = ids[name], self.counts.tables(name), folder / files[name]
            if self._growth is None:
                few = FEW_RARE * self.rows if self._schema.ids[name].min_count is None else 0.0
                write_pieces(file, vocabulary(counts, field, self._spill / f"sorted-{name}", few))
                fewest = pl.scan_parquet(file, glob=False).select(pl.col(COUNT).min()).collect()
                if (fewest.item() or field.min_count) < field.min_count:
                    with_rare_ids.add(name)
            else:
                growth = self._growth
                limits = (field.min_count, growth.options, field.max_size)
                after = grown(growth.ids_before(name), counts, growth.period, *limits)
                after.vocabulary.write_parquet(file)
                after.waiting.write_parquet(folder / waiting[name])
            return alike(file, name)

        for notes in computed_ahead(write_vocabulary, dict.fromkeys(tables.values()), 2, threads=2):
            self.notes += notes
        ids = {
            name: field.model_copy(update={"min_count": 1})
            if tables.get(name) in with_rare_ids
            else field
            for name, field in ids.items()
        }
        update = {"vocabularies": files, "rows": self.rows, "soft_labels": self.soft_labels}
        update["schema_"] = saved.schema_.model_copy(update={"ids": ids})
        if self._growth is not None:
            update["waiting"] = waiting
            update["period"] = self._growth.period
            update["rows"] += self._growth.rows_before
        text = saved.model_copy(update=update).model_dump_json(indent=1)
        (folder / LEARNED).write_text(text, encoding="utf-8")
        return load(folder, indexes=self._spill / INDEXES)
