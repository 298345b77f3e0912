"""Preparation against an independent computation with pandas."""

import gzip
import json

import numpy as np
import pandas as pd
import polars as pl
import pyarrow
import pytest

from stampede.data import DataError
from stampede.data.application import apply_learned
from stampede.data.preparation import PreparationOptions, prepare
from stampede.data.sources import open_source
from stampede.data.splits import Split
from stampede.data.writing import WritingOptions
from stampede.settings import SettingsError, from_key_values
from support.paths import shared
from support.prepared_arrays import arrays_of, manifest_of, vocabulary_of

NUMBERS = [f"I{i}" for i in range(1, 14)]
IDS = [f"C{i}" for i in range(1, 27)]
PARTS = ("train", "validation", "test")


def prepared(folder, kind, path, *, schema="", split_hour=False, **options):
    options = PreparationOptions(**options)
    source = open_source(kind, path, options, schema=schema, split_hour=split_hour)
    prepare(source, options, folder)
    return folder


def write(path, frame):
    frame.to_csv(path, sep="\t", header=False, index=False)
    return str(path)


@pytest.fixture(scope="module")
def made_up():
    """A log in Criteo's layout with missing values, rare ids and negative numbers."""
    draw = np.random.default_rng(0)
    rows = 3000
    frame = pd.DataFrame({"label": draw.integers(0, 2, rows)})
    for i, name in enumerate(NUMBERS):
        values = pd.Series(draw.integers(-3, 10 ** (i % 5 + 1), rows)).astype("Int64")
        frame[name] = values.mask(draw.random(rows) < 0.3)
    for i, name in enumerate(IDS):
        ids = pd.Series(draw.zipf(1.3, rows) % (3 + 50 * i)).map("{:08x}".format)
        frame[name] = ids.mask(draw.random(rows) < (0.2 if i % 2 else 0.0))
    return frame


def rows_by_pandas(column, train, min_count=1, max_size=None):
    """Rows of a column's ids: 0 missing, 1 rare or unseen, then by frequency, ties by text."""
    counts = column[train].dropna().value_counts()
    counts = counts[counts >= min_count]
    order = sorted(counts.index, key=lambda value: (-counts[value], value.encode()))[:max_size]
    rows = {value: i + 2 for i, value in enumerate(order)}
    return column.map(lambda value: 0 if pd.isna(value) else rows.get(value, 1)), len(order) + 2


def numbers_by_pandas(frame, train):
    dense = frame[NUMBERS].astype("float64").fillna(0)
    low, high = dense[train].min(), dense[train].max()
    return ((dense - low) / (high - low).replace(0, 1)).clip(0, 1)


def sequential_parts(rows, test, validation):
    trained = int((1 - test) * rows)
    kept = trained - int(validation * trained)
    return np.repeat([0, 1, 2], [kept, trained - kept, rows - trained])


def check_criteo(folder, frame, parts, min_count=1):
    train = parts == 0
    dense = numbers_by_pandas(frame, train)
    manifest = manifest_of(folder)
    ids = {}
    for entry, name in zip(manifest["fields"], IDS, strict=True):
        ids[name], rows = rows_by_pandas(frame[name], train, min_count)
        assert (entry["name"], entry["rows"]) == (name, rows)
        assert (entry["missing_row"], entry["unseen_row"]) == (0, 1)
    for number, part in enumerate(PARTS):
        found, _ = arrays_of(folder, part)
        mask = parts == number
        if not mask.any():
            assert found == {}
            continue
        np.testing.assert_array_equal(found["label"], frame["label"][mask])
        np.testing.assert_allclose(found["numbers"], dense[mask], rtol=1e-6, atol=1e-7)
        np.testing.assert_array_equal(found["ids"], pd.DataFrame(ids)[mask])
    found, _ = arrays_of(folder, "train")
    assert manifest["ids_dtype"] == "int32" and found["ids"].dtype == np.int32
    assert found["numbers"].dtype == np.float32 and found["label"].dtype == np.uint8


@pytest.mark.parametrize("validation", [0.0, 0.1])
def test_criteo_sequential(made_up, tmp_path, validation):
    path = write(tmp_path / "log.tsv", made_up)
    folder = prepared(tmp_path / "out", "criteo_kaggle", path, validation_fraction=validation)
    check_criteo(folder, made_up, sequential_parts(3000, 1 / 7, validation))


def test_real_criteo_rows(tmp_path):
    log = shared("data/criteo_kaggle_137k.tsv.gz")
    frame = pd.read_csv(
        log, sep="\t", names=["label", *NUMBERS, *IDS], dtype=dict.fromkeys(IDS, "str")
    )
    folder = prepared(tmp_path / "out", "criteo_kaggle", str(log))
    check_criteo(folder, frame, sequential_parts(len(frame), 1 / 7, 0.1))


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


# Splits


def test_random_split_is_exact_and_by_seed(made_up, tmp_path):
    frame = made_up.assign(I1=np.arange(3000))
    path = write(tmp_path / "log.tsv", frame)
    tests = {}
    for seed in (1, 2):
        folder = prepared(tmp_path / f"out{seed}", "criteo_kaggle", path, split="random", seed=seed)
        sizes = [len(arrays_of(folder, part)[0]["label"]) for part in PARTS]
        assert sizes == [2430, 270, 300]
        again = prepared(
            tmp_path / f"again{seed}", "criteo_kaggle", path, split="random", seed=seed
        )
        for part in PARTS:
            for name, array in arrays_of(folder, part)[0].items():
                np.testing.assert_array_equal(array, arrays_of(again, part)[0][name])
        tests[seed] = arrays_of(folder, "test")[0]["label"]
    assert not np.array_equal(tests[1], tests[2])


def test_random_parts_hold_each_row_once(made_up, tmp_path):
    frame = made_up.assign(I1=np.arange(3000))
    path = write(tmp_path / "log.tsv", frame)
    folder = prepared(tmp_path / "out", "criteo_kaggle", path, split="random")
    ranges = json.loads((folder / "learned" / "learned.json").read_text())["ranges"]["I1"]
    width = ranges["high"] - ranges["low"]
    train = arrays_of(folder, "train")[0]["numbers"][:, 0] * width + ranges["low"]
    labels = frame["label"].to_numpy()
    rows = np.round(train).astype(int)
    assert len(set(rows)) == 2430 and np.all(np.diff(rows) > 0)
    np.testing.assert_array_equal(labels[rows], arrays_of(folder, "train")[0]["label"])
    total = sum(arrays_of(folder, part)[0]["label"].sum() for part in PARTS)
    assert total == labels.sum()


def test_highfreq_keeps_the_most_frequent_ids(made_up, tmp_path):
    path = write(tmp_path / "log.tsv", made_up)
    folder = prepared(tmp_path / "out", "criteo_kaggle", path, split="highfreq", keep_ids=3)
    plain = prepared(tmp_path / "plain", "criteo_kaggle", path, split="random")
    assert all(entry["rows"] <= 5 for entry in manifest_of(folder)["fields"])
    for part in PARTS:
        few, many = (arrays_of(f, part)[0]["ids"] for f in (folder, plain))
        # The rows of a random split, with every further id in the row of rare ones.
        np.testing.assert_array_equal(few, np.where(many >= 5, 1, many))


def table(tmp_path, frame, schema, name="log.csv", **options):
    frame.to_csv(tmp_path / name, index=False)
    (tmp_path / "schema.yaml").write_text(schema)
    return prepared(
        tmp_path / "out",
        "table",
        str(tmp_path / name),
        schema=str(tmp_path / "schema.yaml"),
        **options,
    )


BY_DAY = {"schema": "label: y\nids: [user]\n", "split": "by_column", "split_column": "day"}


def dated(rows=200):
    draw = np.random.default_rng(3)
    days = np.sort(draw.choice(["2024-01-01", "2024-01-02", "2024-01-03", "2024-01-04"], rows))
    return pd.DataFrame(
        {"day": days, "user": draw.integers(0, 9, rows), "y": draw.integers(0, 2, rows)}
    )


@pytest.mark.parametrize(
    "options, test, validation",
    [
        (dict(test_values=["2024-01-02"]), ["2024-01-02"], []),
        (dict(test_from="2024-01-03"), ["2024-01-03", "2024-01-04"], []),
        (
            dict(test_from="2024-01-04", validation_values=["2024-01-01"]),
            ["2024-01-04"],
            ["2024-01-01"],
        ),
    ],
)
def test_split_by_column(tmp_path, options, test, validation):
    frame = dated()
    fraction = {} if validation else {"validation_fraction": 0.0}
    folder = table(tmp_path, frame, **BY_DAY, **fraction, **options)
    parts = np.where(frame["day"].isin(test), 2, np.where(frame["day"].isin(validation), 1, 0))
    for number, part in enumerate(PARTS):
        labels = arrays_of(folder, part)[0].get("label", np.empty(0))
        np.testing.assert_array_equal(labels, frame["y"][parts == number])


@pytest.mark.parametrize("value", ["010", "08", "12:00", "2024-03-01", "1_000", "7"])
def test_values_of_a_column_are_taken_as_they_are_written(value):
    options = ["split=by_column", "split_column=c", f"test_from={value}", f"test_values=[{value}]"]
    split = from_key_values(options, Split, "--set")
    assert (split.test_from, split.test_values) == (value, [value])


def test_split_by_column_with_a_share_for_validation(tmp_path):
    frame = dated(2000)
    folder = table(tmp_path, frame, **BY_DAY, test_from="2024-01-04", validation_fraction=0.2)
    rest = (frame["day"] < "2024-01-04").sum()
    sizes = {part: len(arrays_of(folder, part)[0]["label"]) for part in PARTS}
    assert sizes["train"] + sizes["validation"] == rest
    assert 0.15 * rest < sizes["validation"] < 0.25 * rest


def test_split_by_files(made_up, tmp_path):
    names = {}
    for part, rows in (("a", slice(0, 1000)), ("b", slice(1000, 1500)), ("c", slice(1500, 3000))):
        names[part] = write(tmp_path / f"{part}.tsv", made_up[rows])
    folder = prepared(
        tmp_path / "out",
        "criteo_kaggle",
        names["a"],
        split="files",
        validation_path=names["b"],
        test_path=names["c"],
    )
    check_criteo(folder, made_up, np.repeat([0, 1, 2], [1000, 500, 1500]))


def test_criteo_1tb_is_tested_on_its_last_file(made_up, tmp_path):
    # Natural order: day_10 is after day_2.
    for day, rows in ((1, slice(0, 700)), (2, slice(700, 2000)), (10, slice(2000, 3000))):
        with gzip.open(tmp_path / f"day_{day}.gz", "wt") as file:
            made_up[rows].to_csv(file, sep="\t", header=False, index=False)
    folder = prepared(tmp_path / "out", "criteo_1tb", str(tmp_path / "day_*.gz"))
    check_criteo(folder, made_up, np.repeat([0, 1, 2], [1800, 200, 1000]))


# Tables of any schema

MOVIES = """
label: {column: rating, at_least: 4}
ids:
  user: {min_count: 2}
  movie: {max_size: 5}
  genres: {separator: "|", max_ids: 2}
  city: {encode: hash, buckets: 7, seed: 3}
  slot: {encode: integer, size: 12}
  age_group: {encode: quantiles, column: age, buckets: 4}
  weekday: {encode: weekday}
numbers:
  age: {fill: 30, transform: [log1p, standard]}
weight: importance
time: {column: when, format: "%Y-%m-%d %H:%M:%S"}
"""


def movies(rows=400):
    draw = np.random.default_rng(5)
    genres = ["comedy", "drama", "crime", "war"]
    frame = pd.DataFrame(
        {
            "rating": draw.integers(1, 6, rows),
            "user": draw.zipf(1.5, rows) % 60,
            "movie": draw.zipf(1.4, rows) % 40,
            "genres": [
                "|".join(draw.choice(genres, draw.integers(0, 4), replace=False))
                for _ in range(rows)
            ],
            "city": draw.choice(["Köln", "Paris, Texas", "Oslo", ""], rows),
            "slot": draw.integers(0, 12, rows),
            "age": pd.Series(draw.integers(15, 80, rows)).mask(draw.random(rows) < 0.2),
            "importance": draw.random(rows).round(3),
            "when": pd.Timestamp("2024-02-27") + pd.to_timedelta(draw.integers(0, 9**6, rows), "s"),
        }
    )
    return frame


@pytest.mark.parametrize("form", ["csv", "csv.gz", "csv.zst", "tsv", "parquet"])
def test_table_with_every_kind_of_column(tmp_path, form):
    frame, rows = movies(), 400
    path = tmp_path / f"log.{form}"
    if form == "parquet":
        stored = frame.assign(genres=frame["genres"].map(lambda t: t.split("|") if t else None))
        stored.to_parquet(path, row_group_size=70)
    elif form == "csv.zst":
        with pyarrow.output_stream(path, compression="zstd") as file:
            file.write(frame.to_csv(index=False).encode())
    else:
        frame.to_csv(path, index=False, sep="\t" if form == "tsv" else ",")
    (tmp_path / "schema.yaml").write_text(MOVIES)
    folder = prepared(
        tmp_path / "out",
        "table",
        str(path),
        schema=str(tmp_path / "schema.yaml"),
        shard_rows=90,
    )
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


def test_learned_vocabulary_gives_new_data_the_same_rows(made_up, tmp_path):
    path = write(tmp_path / "log.tsv", made_up)
    first = prepared(tmp_path / "out", "criteo_kaggle", path)
    again = tmp_path / "again"
    apply_learned(first, path, WritingOptions(), again)
    whole = {
        name: np.concatenate([arrays_of(first, part)[0][name] for part in PARTS])
        for name in ("ids", "numbers", "label")
    }
    found, _ = arrays_of(again, "test")
    for name, array in whole.items():
        np.testing.assert_array_equal(found[name], array)
    assert manifest_of(again)["parts"]["train"] == []


# Memory and form


@pytest.mark.parametrize("counts_gb", [2.0, 1e-4])
def test_counts_on_disk_give_the_same_ids(made_up, tmp_path, monkeypatch, counts_gb):
    written = []
    write_parquet = pl.DataFrame.write_parquet

    def watched(frame, file, **options):
        written.append(file)
        return write_parquet(frame, file, **options)

    monkeypatch.setattr(pl.DataFrame, "write_parquet", watched)
    monkeypatch.setattr("stampede.data.raw.blocks.BLOCK_BYTES", 1 << 16)
    path = write(tmp_path / "log.tsv", made_up)
    folder = prepared(tmp_path / "out", "criteo_kaggle", path, counts_gb=counts_gb, shard_rows=700)
    check_criteo(folder, made_up, sequential_parts(3000, 1 / 7, 0.1))
    assert any("counts" in file.parts for file in written) == (counts_gb < 1)
    assert not (folder / "counts").exists()


def test_reading_the_log_twice_gives_the_same(made_up, tmp_path, monkeypatch):
    """Without a spool, and where two ids of a vocabulary have one hash."""
    monkeypatch.setattr("stampede.data.raw.blocks.BLOCK_BYTES", 1 << 16)
    path = write(tmp_path / "log.tsv", made_up)
    parts = sequential_parts(3000, 1 / 7, 0.1)
    check_criteo(prepared(tmp_path / "out", "criteo_kaggle", path, spool=False), made_up, parts)
    honest = pl.Series.hash

    def colliding(series, seed=0):
        hashes = honest(series, seed)
        if seed == 0 and series.dtype == pl.String and len(series) > 1:
            hashes[1] = hashes[0]
        return hashes

    monkeypatch.setattr(pl.Series, "hash", colliding)
    check_criteo(prepared(tmp_path / "again", "criteo_kaggle", path), made_up, parts)
    assert not list(tmp_path.rglob("*.arrow")) and not list(tmp_path.rglob("spool"))


def test_one_day_of_criteo_1tb_has_no_last_file(made_up, tmp_path):
    path = write(tmp_path / "day_0", made_up)
    with pytest.raises(SettingsError, match="day_0 is the only one; write a test_fraction"):
        prepared(tmp_path / "out", "criteo_1tb", path)
    folder = prepared(tmp_path / "out", "criteo_1tb", path, test_fraction=0.5)
    check_criteo(folder, made_up, sequential_parts(3000, 0.5, 0.1))


def test_float16_numbers(made_up, tmp_path):
    path = write(tmp_path / "log.tsv", made_up)
    folder = prepared(tmp_path / "out", "criteo_kaggle", path, numbers_dtype="float16")
    expected = numbers_by_pandas(made_up, sequential_parts(3000, 1 / 7, 0.1) == 0)[:300]
    found = arrays_of(folder, "train")[0]["numbers"][:300]
    assert found.dtype == np.float16
    np.testing.assert_allclose(found, expected, atol=1e-3)


def test_numbers_too_large_for_float16(tmp_path):
    frame = dated().assign(x=70_000)
    schema = "label: y\nids: [user]\nnumbers: {x: {transform: []}}\n"
    with pytest.raises(DataError, match=r"number x: found 70000 .*numbers_dtype: float32"):
        table(tmp_path, frame, schema, numbers_dtype="float16")


def test_wide_tables_have_wide_ids(tmp_path):
    frame = dated()
    schema = f"label: y\nids:\n  user: {{encode: integer, size: {2**40}}}\n"
    folder = table(tmp_path, frame.assign(user=frame["user"] + 2**35), schema)
    found = arrays_of(folder, "train")[0]["ids"]
    assert found.dtype == np.int64
    assert found.min() >= 2**35


def test_too_few_rows_and_an_empty_training_part(tmp_path):
    with pytest.raises(DataError, match="5 rows are too few"):
        table(tmp_path, dated(5), "label: y\nids: [user]\n")
    with pytest.raises(DataError, match="training part has no row"):
        table(tmp_path, dated(50), **BY_DAY, test_from="2024", validation_fraction=0.0)
    assert not (tmp_path / "out").exists()
