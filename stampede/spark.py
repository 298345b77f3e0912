# pyright: basic
"""Preparation and scoring on Apache Spark; needs the extra `spark` and Java 17."""

from __future__ import annotations

import glob
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache, partial
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import TYPE_CHECKING, Any

import polars as pl
import pyarrow
import pyarrow.parquet as pq

from stampede import stores
from stampede.data.errors import DataError
from stampede.data.on_spark import OnSpark, failures_told
from stampede.data.options import PreparationOptions
from stampede.data.prepare import prepare as prepare_on
from stampede.data.schema.schema import load_schema
from stampede.data.sources import open_source
from stampede.engine.start_up import same_products
from stampede.files import hidden
from stampede.settings import from_key_values

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


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
    load_schema(stores.fetched(schema))
    given = [f"{key}={json.dumps(value)}" for key, value in (options or {}).items()]
    checked = from_key_values(given, PreparationOptions, "options")
    with stores.outgoing(out, overwrite=False) as folder:
        folder = folder.absolute()
        if folder.exists():
            raise DataError(f"{out}: already exists; delete it, or choose another folder")
        log = hidden(folder, "log")
        try:
            with failures_told():
                dataframe.write.mode("overwrite").parquet(f"file://{log}")
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
        `score_GOAL` of each. To the bit that of `stampede predict` on the same kind of processor,
        but for networks of histories, whose sums go by the longest of a batch.

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
    names = [f"score_{goal}" for goal in model.goals] or ["score"]
    try:
        model.score(pl.from_arrow(dataframe.sparkSession.createDataFrame([], schema).toArrow()))
    except ValueError as failure:
        raise DataError(f"the table to score: {failure}") from None
    for name in names:
        if name in schema.names:
            raise DataError(f"the table to score has a column {name!r}; rename it first")
        schema = type(schema)([*schema.fields, StructField(name, DoubleType())])

    def scored(batches: Iterable[pyarrow.RecordBatch]) -> Iterator[pyarrow.RecordBatch]:
        for batch in batches:
            found = _model(place, version).score(pl.from_arrow(batch)).reshape(len(batch), -1)
            arrays = [*batch.columns, *map(pyarrow.array, found.T.astype("float64"))]
            yield pyarrow.RecordBatch.from_arrays(arrays, [*batch.schema.names, *names])

    return dataframe.mapInArrow(scored, schema)


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
