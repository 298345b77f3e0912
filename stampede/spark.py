# pyright: basic
"""Preparation and scoring on Apache Spark; needs the extra `spark` and Java 17."""

from __future__ import annotations

import glob
import hashlib
import json
import os
import re
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import TYPE_CHECKING, Any

import polars as pl
import pyarrow
import pyarrow.parquet as pq
from polars import selectors

from stampede import stores
from stampede.data.errors import DataError
from stampede.data.on_spark import OnSpark, failures_told
from stampede.data.options import PreparationOptions
from stampede.data.prepare import prepare as prepare_on
from stampede.data.raw.nested import holds, unnested, values_within
from stampede.data.schema.schema import load_schema
from stampede.data.sources import open_source
from stampede.engine.start_up import same_products
from stampede.files import hidden
from stampede.settings import from_key_values

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def prepare(
    dataframe: DataFrame,
    schema: str | os.PathLike[str],
    out: str | os.PathLike[str],
    options: Mapping[str, Any] | None = None,
) -> Path:
    """Prepare the rows of a Spark table, in the order of its partitions, for `data.kind=prepared`.

    They are written as Parquet beside `out`, prepared by `stampede prepare --spark`'s tasks, and
    deleted.

    Args:
        dataframe: with the columns that the schema names. Sort it by time for a sequential split.
        schema: the schema's file.
        out: a new folder that all workers see under this path, or a URL, to which it is copied
            from $STAMPEDE_STORES, which they see then.
        options: as after `stampede prepare --set`, such as `{"split": "random"}`.

    Returns:
        The folder on this machine.

    Raises:
        DataError, SettingsError, StoreError: what is wrong, and what to write instead.
    """
    used = load_schema(stores.fetched(schema)).used_columns()
    given = [f"{key}={json.dumps(value)}" for key, value in (options or {}).items()]
    checked = from_key_values(given, PreparationOptions, "options")
    with stores.outgoing(out, overwrite=False) as folder:
        folder = folder.absolute()
        if folder.exists():
            raise DataError(f"{out}: already exists; delete it, or choose another folder")
        log = hidden(folder, "log")
        try:
            with failures_told(), _times_as_everywhere(dataframe.sparkSession):
                split = {checked.split_column} - {None}
                # Without any of them all are written, so that the names are told.
                places = _places(dataframe, used | split) or range(len(dataframe.columns))
                taken = _columns(dataframe, places)
                taken.write.mode("overwrite").parquet(f"file://{log}")
            if not any(pq.read_metadata(file).num_rows for file in log.glob("*.parquet")):
                raise DataError(f"{out}: the table has no rows that this process sees; give some")
            files = f"{glob.escape(str(log))}/*.parquet"
            source = open_source("table", files, checked, schema=str(schema))
            prepare_on(source, checked, folder, partial(OnSpark, dataframe.sparkSession))
        except DataError as failure:
            # The user knows nothing of its files.
            told = re.sub(rf"{re.escape(str(log))}/[^/:, ]+", "the table", str(failure))
            raise DataError(told) from failure.__cause__
        finally:
            shutil.rmtree(log, ignore_errors=True)
    return folder


def scores(dataframe: DataFrame, package: str | os.PathLike[str]) -> DataFrame:
    """Score a Spark table with an exported model, where its rows are.

    Args:
        dataframe: with the columns of the log.
        package: a folder of `stampede export` that all workers see under this path, or a URL. Its
            `load.py` is executed.

    Returns:
        The table with a column `score`, double: the probability of a click; with several goals
        `score_GOAL` of each. To the bit that of `stampede predict` on the same kind of processor.

    Raises:
        DataError: it is not a package, or the table lacks a column, or has one of these names.
    """
    from pyspark.sql.types import DoubleType, StructField

    place = str(package) if stores.is_url(package) else str(stores.local(package).absolute())
    if not stores.exists(f"{place}/package.json"):
        raise DataError(f"{place}: is not a package; write a folder that `stampede export` made")
    about = (stores.fetched(place) / "package.json").read_bytes()
    # Of the package as it is now, not of one that a process has read before.
    version = hashlib.sha256(about).hexdigest()
    model, schema = _model(place, version), dataframe.schema
    places = _places(dataframe, model.columns)
    names = [f"score_{goal}" for goal in model.goals] or ["score"]
    try:
        with failures_told():
            # Of all columns, as those that Arrow lacks would fail in Spark's workers.
            numbered = [StructField(str(n), one.dataType) for n, one in enumerate(schema.fields)]
            none = dataframe.sparkSession.createDataFrame([], type(schema)(numbered)).toArrow()
        named = none.select(places).rename_columns([schema.names[place] for place in places])
        model.score(_rows(named, model.columns))
    except ValueError as failure:
        raise DataError(f"the table to score: {failure}") from None
    for name in names:
        if name in schema.names:
            raise DataError(f"the table to score has a column {name!r}; rename it first")
        schema = type(schema)([*schema.fields, StructField(name, DoubleType())])

    def scored(batches: Iterable[pyarrow.RecordBatch]) -> Iterator[pyarrow.RecordBatch]:
        for batch in batches:
            of_batch = _model(place, version)
            given = _rows(batch.select(places), of_batch.columns)
            found = of_batch.score(given).reshape(len(batch), -1)
            arrays = [*batch.columns, *map(pyarrow.array, found.T.astype("float64"))]
            yield pyarrow.RecordBatch.from_arrays(arrays, [*batch.schema.names, *names])

    return dataframe.mapInArrow(scored, schema)


def _places(dataframe: DataFrame, used: Collection[str]) -> list[int]:
    """Where a table has the used columns, and those that may have used values within them.

    Raises:
        DataError: it has one twice.
    """
    names = dataframe.columns
    found = [place for place, name in enumerate(names) if holds(name, used)]
    taken = [names[place] for place in found]
    twice = next((name for name in taken if taken.count(name) > 1), None)
    if twice is not None:
        raise DataError(f"the table has the column {twice!r} twice; rename or drop one of them")
    return found


def _columns(dataframe: DataFrame, places: Sequence[int]) -> DataFrame:
    """Some columns of a table, others of which may have the same names but for their case."""
    names = dataframe.columns
    numbered = dataframe.toDF(*map(str, range(len(names))))
    return numbered.select(*(numbered[str(place)].alias(names[place]) for place in places))


@contextmanager
def _times_as_everywhere(session: SparkSession) -> Iterator[None]:
    """Let Spark write times as others do: INT96, its default, has neither their zone nor range."""
    key, conf = "spark.sql.parquet.outputTimestampType", session.conf
    before = conf.get(key)
    conf.set(key, "TIMESTAMP_MICROS")
    try:
        yield
    finally:
        conf.set(key, before or "INT96")


def _rows(given: pyarrow.Table | pyarrow.RecordBatch, columns: Sequence[str]) -> pl.DataFrame:
    """Rows with a model's columns, as from Parquet files: also of structs, and times in UTC."""
    found = pl.DataFrame(pl.from_arrow(given))
    in_zones = selectors.datetime(time_zone="*")
    found = found.with_columns(in_zones.dt.convert_time_zone("UTC"))
    known = {*found.columns, *values_within(found.schema)}
    return unnested(found, [name for name in columns if name in known])


@lru_cache(maxsize=1)
def _model(place: str, version: str) -> Any:
    """The model of a package, by its own load.py; read once in each of Spark's processes."""
    same_products()
    file = stores.fetched(place) / "load.py"
    spec = spec_from_file_location("load_of_a_package", file)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.load()
