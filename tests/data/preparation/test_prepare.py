"""Preparation: its two passes, stored types, tables and the public logs."""

import gzip

import numpy as np
import pandas as pd
import pytest

from stampede.data import DataError
from stampede.data.apply import apply_learned
from stampede.data.errors import UnfinishedFileError
from stampede.data.options import PreparationOptions, Split, WritingOptions
from stampede.data.prepare import prepare
from stampede.data.sources import open_source
from stampede.settings import SettingsError
from support.movie_runs import prepared_movies
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
from support.tampering import swap_users


def test_reading_the_log_twice_gives_the_same(tmp_path):
    frame = dated().assign(x=np.random.default_rng(0).random(200))
    schema = "label: y\nids: {user: {}, bin: {encode: quantiles, column: x, buckets: 50}}\n"
    found = []
    for spool in (True, False):
        (tmp_path / str(spool)).mkdir()
        folder = table(tmp_path / str(spool), frame, schema + "numbers: [x]\n", spool=spool)
        found.append([arrays_of(folder, part)[0] for part in PARTS])
    for one, other in zip(*found, strict=True):
        for name, array in one.items():
            np.testing.assert_array_equal(array, other[name])
    assert not list(tmp_path.rglob("*.arrow")) and not list(tmp_path.rglob("spool"))


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
    kept = frame["genres"].str.split("|").str[:2]
    seen = kept[train].explode().replace("", np.nan).value_counts()
    genres = vocabulary_of(folder, "genres")
    assert seen[list(genres)].is_monotonic_decreasing and len(genres) == len(seen)
    manifest = manifest_of(folder)
    names = [entry["name"] for entry in manifest["fields"]]
    assert names == ["user", "movie", "city", "slot", "age_group", "weekday", "genres"]
    expected = {
        "user": rows_by_pandas(text["user"], train, 2)[0],
        "movie": rows_by_pandas(text["movie"], train, 1, 5)[0],
        "slot": frame["slot"],
        "weekday": frame["when"].dt.weekday,
        "age_group": np.where(frame["age"].isna(), 0, group),
    }
    city = {}
    for number, part in enumerate(PARTS):
        mask = parts == number
        found, bags = arrays_of(folder, part)
        ids = dict(zip(names, found["ids"].T, strict=False))
        np.testing.assert_array_equal(found["label"], (frame["rating"] >= 4)[mask])
        for name, rows in expected.items():
            np.testing.assert_array_equal(ids[name], rows[mask])
        np.testing.assert_allclose(found["numbers"][:, 0], standard[mask], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(found["weight"], frame["importance"][mask], rtol=1e-6)
        assert bags[0] == [[genres.get(genre, 0) for genre in cell] for cell in kept[mask]]
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
    path = write(tmp_path / "day_0", made_up)
    only = r"day_0 is the only one; write --set test_fraction=0\.1"
    with pytest.raises(SettingsError, match=only):
        prepared(tmp_path / "one", "criteo_1tb", path)
    folder = prepared(tmp_path / "one", "criteo_1tb", path, test_fraction=0.5)
    check_criteo(folder, made_up, sequential_parts(3000, 0.5, 0.1))


def test_what_was_learned_is_applied_to_another_log(made_up, tmp_path):
    path = write(tmp_path / "log.tsv", made_up)
    first = prepared(tmp_path / "out", "criteo_kaggle", path)
    apply_learned(first, path, WritingOptions(), tmp_path / "again")
    found, _ = arrays_of(tmp_path / "again", "test")
    for name in ("ids", "numbers", "label"):
        whole = np.concatenate([arrays_of(first, part)[0][name] for part in PARTS])
        np.testing.assert_array_equal(found[name], whole)
    assert manifest_of(tmp_path / "again")["parts"]["train"] == []


def test_a_changed_vocabulary_is_not_applied(tmp_path):
    folder = prepared_movies(tmp_path)
    swap_users(folder)
    with pytest.raises(DataError, match=r"user.parquet: .* since the data were prepared; delete"):
        apply_learned(folder, str(tmp_path / "log.csv"), WritingOptions(), tmp_path / "out")
    assert not (tmp_path / "out").exists()
