"""Counts the values of columns in bounded memory, and gives ids their rows, period by period."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import polars as pl

from stampede.data.options import GrowthOptions
from stampede.data.schema.schema import Schema, Vocabulary
from stampede.settings import counted

VALUE, COUNT = "value", "count"

# More columns of a vocabulary that grows: periods, counted from 1.
ROW_SINCE, SEEN = "row_since", "seen"
PERIOD = "period"

KEPT = {VALUE: pl.String, COUNT: pl.Int64, ROW_SINCE: pl.Int32, SEEN: pl.Int32}
WAITING = {VALUE: pl.String, PERIOD: pl.Int32, COUNT: pl.Int64}

# The first rows of a table; the ids of the vocabulary follow.
MISSING_ROW, UNSEEN_ROW, FIRST_ROW = 0, 1, 2

# Counts of fewer rows wait before they are merged.
_PENDING_ROWS = 200_000
_PARTITIONS = 32


class Distinct(NamedTuple):
    """The distinct values of a column, so that work on each value is done once."""

    values: pl.Series  # each value once, in any order; null is one if the column has nulls
    codes: np.ndarray  # `[n]` index of each row's value, of the narrowest unsigned type


def distinct_ids(frame: pl.DataFrame, schema: Schema) -> dict[str, Distinct]:
    """Distinct values of the single-valued vocabulary fields of typed rows, by name."""
    return {
        name: distinct(frame[name])
        for name, field in schema.ids.items()
        if isinstance(field, Vocabulary) and field.separator is None
    }


def distinct(texts: pl.Series) -> Distinct:
    """Distinct values of a String column; told apart by a 64-bit hash, like ids in `RowsOfIds`."""
    # Slow to import.
    import pandas as pd

    codes, hashes = pd.factorize(texts.hash().to_numpy())
    first = np.empty(len(hashes), np.int64)
    first[codes[::-1]] = np.arange(len(texts))[::-1]
    return Distinct(texts.gather(first), codes.astype(np.min_scalar_type(len(hashes))))


class ValueCounts:
    """Counts the values of several columns, a chunk at a time.

    Counts are one merged table and newer ones. When the newer ones have as many rows as the merged
    one, all are merged, so each row is merged a logarithmic number of times. Beyond a budget in
    bytes, the largest counts move to a folder, partitioned by a hash of the value, and are merged
    at the end, one partition after the other.

    Args:
        columns: what each column is counted as; columns of one name are counted together.

    Attributes:
        names: what is counted.
    """

    def __init__(self, columns: Mapping[str, str], budget: int, folder: Path) -> None:
        self._columns, self.names = columns, list(dict.fromkeys(columns.values()))
        names = self.names
        # The merged table of each name, and newer ones.
        self._tables: dict[str, list[pl.DataFrame]] = {name: [] for name in names}
        # Added up here, as asking Polars each time takes longer than counting.
        self._bytes = dict.fromkeys(names, 0)
        self._spilled = dict.fromkeys(names, 0)
        self._budget = budget
        self._folder = folder

    def add(self, chunk: pl.DataFrame, distinct: Mapping[str, Distinct]) -> None:
        """Count the values of some rows and of other `distinct` columns, without nulls.

        Lists count value by value.
        """
        columns = {n: pl.col(n) for n in self._columns if n not in distinct}
        counted = chunk.select(
            (one.explode() if isinstance(chunk.schema[name], pl.List) else one)
            .drop_nulls()
            .value_counts(name=COUNT)
            .implode()
            .alias(name)
            for name, one in columns.items()
        )
        for column, name in self._columns.items():
            if column in distinct:
                values, codes = distinct[column]
                counts = pl.Series(COUNT, np.bincount(codes, minlength=len(values)))
                table = pl.DataFrame([values.alias(VALUE), counts])
                table = table.filter((counts > 0) & table[VALUE].is_not_null())
            else:
                table = counted[column][0].struct.unnest()
                table.columns = [VALUE, COUNT]
            if len(table):
                self._append(name, table)
            tables = self._tables[name]
            newer = sum(map(len, tables[1:]))
            if newer > _PENDING_ROWS and newer > len(tables[0]):
                self._append(name, self._release(name))
        if sum(self._bytes.values()) <= self._budget:
            return
        # Halve the memory: merge tables, then move the largest columns to disk.
        for name in sorted(self._bytes, key=self._bytes.__getitem__, reverse=True):
            if self._tables[name]:
                self._append(name, self._release(name))
            if sum(self._bytes.values()) <= self._budget // 2:
                return
            self._spill(name)

    def tables(self, name: str) -> Iterator[pl.DataFrame]:
        """The counts of a name, released from memory: tables of `value` and `count`.

        Each value appears once, in one of the tables.
        """
        if self._spilled[name]:
            self._spill(name)
            for part in range(_PARTITIONS):
                files = sorted((self._folder / name).glob(f"{part}-*.parquet"))
                if files:
                    yield _summed([pl.read_parquet(file) for file in files])
            shutil.rmtree(self._folder / name)
        elif self._tables[name]:
            yield self._release(name)

    def _append(self, name: str, table: pl.DataFrame) -> None:
        self._tables[name].append(table)
        self._bytes[name] += int(table.estimated_size())

    def _release(self, name: str) -> pl.DataFrame:
        """Remove all tables of a name and return them as one."""
        found = _summed(self._tables[name])
        self._tables[name].clear()
        self._bytes[name] = 0
        return found

    def _spill(self, name: str) -> None:
        if not self._tables[name]:
            return
        folder = self._folder / name
        folder.mkdir(parents=True, exist_ok=True)
        part = (pl.col(VALUE).hash(seed=1) % _PARTITIONS).alias("part")
        parts = self._release(name).with_columns(part).partition_by("part", as_dict=True)
        for (number,), rows in parts.items():
            path = folder / f"{number}-{self._spilled[name]:06d}.parquet"
            rows.drop("part").write_parquet(path, compression="lz4")
        self._spilled[name] += 1


def _summed(tables: Sequence[pl.DataFrame]) -> pl.DataFrame:
    """One table of several; the counts of several are Int64."""
    if len(tables) == 1:
        return tables[0]
    table = pl.concat([table.cast({COUNT: pl.Int64}) for table in tables]).lazy()
    # In half the time of the other engine.
    return table.group_by(VALUE).agg(pl.col(COUNT).sum()).collect(engine="streaming")


def vocabulary(counts: Iterable[pl.DataFrame], field: Vocabulary, few: float = 0.0) -> pl.DataFrame:
    """The ids that get a row: most frequent first, ties in the order of their text.

    The id in line i of the result, `value` String and `count` Int64, has row `FIRST_ROW + i`.

    Args:
        counts: tables of `value` and `count` with each value in one of them.
        few: ids rarer than `min_count` get rows too if all of them together occur less often.
    """
    kept = rare = pl.DataFrame(schema={VALUE: pl.String, COUNT: pl.Int64})
    for table in counts:
        table = table.select(pl.col(VALUE), pl.col(COUNT).cast(pl.Int64))
        is_kept = pl.col(COUNT) >= field.min_count
        kept = pl.concat([kept, table.filter(is_kept)])
        if few:
            rare = pl.concat([rare, table.filter(~is_kept)])
            if rare[COUNT].sum() >= few:
                few, rare = 0.0, rare.clear()
        if field.max_size is not None and len(kept) > 2 * field.max_size:
            kept = _sorted(kept).head(field.max_size)
    kept = _sorted(pl.concat([kept, rare]))
    return kept if field.max_size is None else kept.head(field.max_size)


def _sorted(table: pl.DataFrame) -> pl.DataFrame:
    return table.sort([COUNT, VALUE], descending=[True, False])


def alike(table: pl.DataFrame, field: str) -> list[str]:
    """Sentences on the ids of a vocabulary that a person would take for another of its ids."""
    values, said = table[VALUE], []
    accented = values.str.len_bytes() != values.str.len_chars()
    ways = {
        "by blanks around them": values.str.strip_chars(),
        "in how accents are encoded (Unicode NFC, NFD)": values.set(~accented, None).str.normalize(
            "NFC"
        ),
    }
    for way, form in ways.items():
        found = table.with_columns(form.alias("form")).filter(pl.col("form") != pl.col(VALUE))
        found = found.filter(pl.col("form").is_in(values.implode()))
        if len(found):
            one, other = found.row(0, named=True)[VALUE], found["form"][0]
            said.append(
                f"{counted(len(found), 'id')} of {field}, in {counted(found[COUNT].sum(), 'row')}, "
                f"differ from another id only {way}, such as {one!r} beside {other!r}: each has "
                "a row of its own; write them alike if they mean the same"
            )
    return said


class Grown(NamedTuple):
    """A field's ids after a period; the id in line i of the vocabulary has row `FIRST_ROW + i`."""

    vocabulary: pl.DataFrame  # columns of `KEPT`; counts are those since the id began to wait
    waiting: pl.DataFrame  # ids without a row; columns of `WAITING`


def nothing_known() -> Grown:
    """Before the first period."""
    return Grown(pl.DataFrame(schema=KEPT), pl.DataFrame(schema=WAITING))


def grown(
    before: Grown,
    counts: Iterable[pl.DataFrame],
    period: int,
    min_count: int,
    options: GrowthOptions,
    max_size: int | None = None,
) -> Grown:
    """A field's ids after one more period.

    The result depends on how often each id occurs in each period, not on the order of rows.

    Args:
        counts: tables of `value` and `count` in this period; each value in one of them.
        period: its number, from 1.
        min_count: occurrences that give an id a row.
        max_size: most ids of this field with a row, besides `options.max_rows`.
    """
    now = [table.select(pl.col(VALUE), pl.col(COUNT).cast(pl.Int64)) for table in counts]
    seen = pl.concat([pl.DataFrame(schema={VALUE: pl.String, COUNT: pl.Int64}), *now])
    kept = before.vocabulary.join(seen, on=VALUE, how="left", suffix="_now", maintain_order="left")
    is_here = pl.col(f"{COUNT}_now").is_not_null()
    kept = kept.select(
        VALUE,
        pl.col(COUNT) + pl.col(f"{COUNT}_now").fill_null(0),
        ROW_SINCE,
        pl.when(is_here).then(pl.lit(period, pl.Int32)).otherwise(pl.col(SEEN)).alias(SEEN),
    )
    new = seen.join(before.vocabulary, on=VALUE, how="anti").select(
        VALUE, pl.lit(period, pl.Int32).alias(PERIOD), COUNT
    )
    recent = before.waiting.filter(pl.col(PERIOD) > period - options.admission_periods)
    waiting = pl.concat([recent, new])
    admitted = (
        waiting.group_by(VALUE)
        .agg(pl.col(COUNT).sum(), pl.col(PERIOD).max().alias(SEEN))
        .filter(pl.col(COUNT) >= min_count)
        .sort([COUNT, VALUE], descending=[True, False])
        .with_columns(pl.lit(period, pl.Int32).alias(ROW_SINCE))
    )
    most = min((limit for limit in (options.max_rows, max_size) if limit is not None), default=None)
    placed = kept.with_row_index("place")
    free = pl.Series("place", [], pl.UInt32)
    if most is not None and len(kept) + len(admitted) > most:
        room = max(most - len(kept), 0)
        # Ids absent from the period lose their rows. Among equals, the largest text goes first: it
        # got its row last.
        by = [SEEN, COUNT] if options.evict == "lru" else [COUNT, SEEN]
        absent = placed.filter(pl.col(SEEN) < period)
        given_up = absent.sort([*by, VALUE], descending=[False, False, True])
        free = given_up["place"].head(len(admitted) - room)
        admitted = admitted.head(room + len(free))
    # New ids take the free places in turn, then new places.
    new_places = pl.int_range(len(kept), len(kept) + len(admitted), dtype=pl.UInt32, eager=True)
    places = pl.concat([free, new_places.alias("place")]).head(len(admitted))
    kept = placed.filter(~pl.col("place").is_in(free.implode()))
    vocabulary = pl.concat([kept, admitted.with_columns(places).select(kept.columns)])
    vocabulary = vocabulary.sort("place").drop("place")
    waiting = waiting.join(admitted, on=VALUE, how="anti").sort([PERIOD, VALUE])
    return Grown(vocabulary, waiting)


def read_vocabulary(path: Path, columns: Iterable[str] = (VALUE,)) -> pl.DataFrame:
    """Columns of a vocabulary's file by row. Raises OSError or ValueError if it is damaged."""
    try:
        return pl.read_parquet(path, columns=[*columns], glob=False)
    # Damage that Polars does not detect makes it panic, and a panic is not an Exception.
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException) as failure:
        raise ValueError(f"{path.name} cannot be read ({failure!s:.100})") from None


class RowsOfIds:
    """Finds the rows of ids, String or null: `[n]` int64.

    It keeps a 64-bit hash of each id, not the text. An unseen id shares the hash of a known one
    with a probability of size / 2^64.
    """

    def __init__(self, values: pl.Series) -> None:
        # Slow to import.
        import pandas as pd

        self.size, self._seed = len(values), 0
        self._index = pd.Index(values.hash(self._seed).to_numpy())
        while not self._index.is_unique:
            self._seed += 1
            self._index = pd.Index(values.hash(self._seed).to_numpy())

    def __call__(self, ids: pl.Series) -> np.ndarray:
        """The row of each id."""
        # Ids that are not in the index get -1, which becomes UNSEEN_ROW.
        rows = self._index.get_indexer(ids.hash(self._seed).to_numpy()) + FIRST_ROW
        if ids.null_count():
            rows[ids.is_null().to_numpy()] = MISSING_ROW
        return rows
