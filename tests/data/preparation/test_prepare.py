"""Preparation: its two passes, stored types, tables and the public logs."""

import gzip

import numpy as np
import pandas as pd
import polars as pl
import pytest

from stampede.data import DataError
from stampede.data.errors import UnfinishedFileError
from stampede.data.learning.vocabulary import distinct_ids
from stampede.data.options import PreparationOptions, Split
from stampede.data.prepare import Spool, prepare
from stampede.data.prepared.writer import RowsOfParts
from stampede.data.schema.schema import Schema
from stampede.data.sources import open_source
from stampede.settings import SettingsError
from support.movies import MOVIES, movies, write_movies
from support.paths import shared
from support.prepared_arrays import arrays_of, manifest_of, vocabulary_of
from support.preparing import (
    PARTS,
    check_criteo,
    dated,
    prepared,
    rows_by_pandas,
    sequential_parts,
    table,
    write,
)


def test_reading_the_log_twice_gives_the_same(made_up, tmp_path, monkeypatch):
    monkeypatch.setattr("stampede.data.raw.files.BLOCK_BYTES", 1 << 16)
    path = write(tmp_path / "log.tsv", made_up)
    parts = sequential_parts(3000, 1 / 7, 0.1)
    check_criteo(prepared(tmp_path / "out", "criteo_kaggle", path, spool=False), made_up, parts)
    assert not list(tmp_path.rglob("*.arrow")) and not list(tmp_path.rglob("spool"))


SCHEMA = Schema.model_validate(
    {
        "label": "y",
        "numbers": ["whole", "fine"],
        "ids": {"a": {}, "many": {"separator": "|"}, "cut": {"encode": "quantiles", "buckets": 2}},
    }
)
FRAME = pl.DataFrame(
    {
        "#label": pl.Series([0, 1, 1], dtype=pl.Float32),
        "whole": [1.0, None, -(2.0**30)],
        "fine": [0.1, None, 1e300],
        "a": ["u", None, "u"],
        "many": [["p", "q"], [], None],
        "cut": [None, 0.5, 0.25],
    }
)


def test_rows_come_back_as_they_were(tmp_path):
    spool = Spool(tmp_path / "spool", SCHEMA)
    distinct = distinct_ids(FRAME, SCHEMA)
    rows = RowsOfParts(FRAME.drop(distinct), np.array([0, 2, 1], np.int8), 77, distinct)
    spool.append(rows)
    spool.append(rows._replace(position=99))
    found = list(spool)
    assert [rows.position for rows in found] == [77, 99]
    for rows in found:
        assert rows.frame.equals(FRAME.drop("a"))
        assert rows.frame.schema["fine"] == rows.frame.schema["whole"] == pl.Float64
        assert rows.parts.tolist() == [0, 2, 1]
        column = rows.distinct["a"]
        assert column.values[column.codes].equals(FRAME["a"], check_names=False)
    assert not any((tmp_path / "spool").iterdir())


def test_numbers_too_large_for_float16(tmp_path):
    frame = dated().assign(x=70_000)
    schema = "label: y\nids: [user]\nnumbers: {x: {transform: []}}\n"
    with pytest.raises(DataError, match=r"number x: found 70000 .*data.numbers_dtype=float32"):
        table(tmp_path, frame, schema, numbers_dtype="float16")


def test_wide_tables_have_wide_ids(tmp_path):
    frame = dated()
    schema = f"label: y\nids:\n  user: {{encode: integer, size: {2**40}}}\n"
    folder = table(tmp_path, frame.assign(user=frame["user"] + 2**35), schema)
    found = arrays_of(folder, "train")[0]["ids"]
    assert found.dtype == np.int64
    assert found.min() >= 2**35


@pytest.mark.parametrize("form", ["csv.gz", "tsv", "parquet"])
def test_table_with_every_kind_of_column(tmp_path, form, monkeypatch):
    # Chunks that end within shards.
    monkeypatch.setattr("stampede.data.raw.files.BLOCK_BYTES", 1 << 11)
    frame, rows = movies(), 400
    path = write_movies(tmp_path / f"log.{form}", frame)
    (tmp_path / "schema.yaml").write_text(MOVIES)
    schema = str(tmp_path / "schema.yaml")
    folder = prepared(tmp_path / "out", "table", str(path), schema=schema, shard_rows=90)
    parts = sequential_parts(rows, 0.1, 0.1)
    train = parts == 0
    text = frame.astype({"user": str, "movie": str})
    age = frame["age"].fillna(30).map(np.log1p)
    standard = (age - age[train].mean()) / age[train].std(ddof=0)
    edges = np.quantile(frame["age"][train].dropna(), [0.25, 0.5, 0.75], method="inverted_cdf")
    group = np.searchsorted(np.unique(edges), frame["age"], side="left") + 1
    genre_rows, _ = rows_by_pandas(
        pd.Series([g for cell in frame["genres"][train] for g in cell.split("|")[:2] if g]),
        slice(None),
    )
    genres = vocabulary_of(folder, "genres")
    assert max(genres.values()) == genre_rows.max()
    manifest = manifest_of(folder)
    names = [entry["name"] for entry in manifest["fields"]]
    assert names == ["user", "movie", "city", "slot", "age_group", "weekday", "genres"]
    city = {}
    for number, part in enumerate(PARTS):
        mask = parts == number
        found, bags = arrays_of(folder, part)
        ids = dict(zip(names, found["ids"].T, strict=False))
        np.testing.assert_array_equal(found["label"], (frame["rating"] >= 4)[mask])
        np.testing.assert_array_equal(ids["user"], rows_by_pandas(text["user"], train, 2)[0][mask])
        np.testing.assert_array_equal(
            ids["movie"], rows_by_pandas(text["movie"], train, 1, 5)[0][mask]
        )
        np.testing.assert_array_equal(ids["slot"], frame["slot"][mask])
        np.testing.assert_array_equal(ids["weekday"], frame["when"].dt.weekday[mask])
        np.testing.assert_array_equal(
            ids["age_group"], np.where(frame["age"].isna(), 0, group)[mask]
        )
        np.testing.assert_allclose(found["numbers"][:, 0], standard[mask], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(found["weight"], frame["importance"][mask], rtol=1e-6)
        cells = [cell.split("|")[:2] if cell else [] for cell in frame["genres"][mask]]
        assert bags[0] == [[genres[g] for g in cell] or [0] for cell in cells]
        for name, row in zip(frame["city"][mask], ids["city"], strict=True):
            assert city.setdefault(name, row) == row
    assert city[""] == 7  # missing
    assert len(manifest["parts"]["train"]) == 4


def test_a_file_that_grows_while_it_is_read(made_up, tmp_path):
    path = write(tmp_path / "log.tsv", made_up)
    source = open_source("criteo_kaggle", str(path), Split())
    with (tmp_path / "log.tsv").open("a") as file:
        file.write("1\t2")
    with pytest.raises(UnfinishedFileError, match="wait until the file is complete"):
        prepare(source, PreparationOptions(), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("split_hour", [False, True])
def test_real_avazu_rows(tmp_path, split_hour):
    log = shared("data/avazu_20k.csv.gz")
    frame = pd.read_csv(log, dtype=str)
    folder = prepared(tmp_path / "out", "avazu", str(log), split_hour=split_hour)
    parts = sequential_parts(len(frame), 0.1, 0.1)
    manifest = manifest_of(folder)
    time = pd.to_datetime(frame["hour"], format="%y%m%d%H")
    columns = [c for c in frame.columns if c not in ("id", "click", "hour")]
    expected = {} if split_hour else {"hour": rows_by_pandas(frame["hour"], parts == 0)[0]}
    if split_hour:
        expected = {"hour_of_day": time.dt.hour, "weekday": time.dt.weekday}
    for name in columns:
        expected[name], _ = rows_by_pandas(frame[name], parts == 0)
    assert [entry["name"] for entry in manifest["fields"]] == list(expected)
    for number, part in enumerate(PARTS):
        found, _ = arrays_of(folder, part)
        np.testing.assert_array_equal(found["ids"], pd.DataFrame(expected)[parts == number])
        np.testing.assert_array_equal(found["label"], frame["click"][parts == number].astype(int))
        np.testing.assert_array_equal(
            found["time"], time[parts == number].astype("datetime64[s]").astype("int64")
        )
        assert found["numbers"].shape == (sum(parts == number), 0)


def test_criteo_1tb_is_tested_on_its_last_file(made_up, tmp_path):
    # Natural order: day_10 is after day_2.
    for day, rows in ((1, slice(0, 700)), (2, slice(700, 2000)), (10, slice(2000, 3000))):
        with gzip.open(tmp_path / f"day_{day}.gz", "wt") as file:
            made_up[rows].to_csv(file, sep="\t", header=False, index=False)
    folder = prepared(tmp_path / "out", "criteo_1tb", str(tmp_path / "day_*.gz"))
    check_criteo(folder, made_up, np.repeat([0, 1, 2], [1800, 200, 1000]))


def test_one_day_of_criteo_1tb_has_no_last_file(made_up, tmp_path):
    path = write(tmp_path / "day_0", made_up)
    with pytest.raises(
        SettingsError, match=r"day_0 is the only one; write --set test_fraction=0\.1"
    ):
        prepared(tmp_path / "out", "criteo_1tb", path)
    folder = prepared(tmp_path / "out", "criteo_1tb", path, test_fraction=0.5)
    check_criteo(folder, made_up, sequential_parts(3000, 0.5, 0.1))
