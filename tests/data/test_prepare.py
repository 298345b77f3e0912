"""Preparation: its passes, stored types, the public logs, division of rows, the command, kills."""

import gzip
import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pandas as pd
import pytest

from stampede.data import DataError
from stampede.data.apply import apply_learned
from stampede.data.errors import UnfinishedFileError
from stampede.data.options import PreparationOptions, Split, WritingOptions
from stampede.data.prepare import prepare
from stampede.data.prepare_command import main
from stampede.data.prepared.reader import open_prepared
from stampede.data.sources import open_source
from stampede.settings import SettingsError, from_key_values
from support.movie_runs import prepared_movies
from support.movies import MOVIES, movies, write_movies
from support.paths import shared
from support.prepared_arrays import arrays_of, manifest_of, vocabulary_of
from support.preparing import (
    BY_DAY,
    IDS,
    NUMBERS,
    PARTS,
    check_criteo,
    dated,
    prepared,
    rows_by_pandas,
    sequential_parts,
    table,
    write,
)
from support.shop import SHOP, shop, write_shop
from support.tampering import swap_users


@pytest.fixture(scope="session")
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


def test_lists_written_as_json_are_the_same_ids(tmp_path):
    frame, found = shop(), []
    cells = [cell.split("|") if cell else [] for cell in frame["history"]]
    cells = [[*ids, 'a"\\é😀,] ', 7] for ids in cells]
    texts = ["~".join(map(str, ids)) for ids in cells]
    for name, separator, column in (
        ("text", '"~"', texts),
        ("json", "json", [json.dumps(ids, ensure_ascii=n % 2 > 0) for n, ids in enumerate(cells)]),
    ):
        folder = tmp_path / name
        schema = SHOP.replace("max_ids: 4", "max_ids: 9").replace('"|"', separator)
        write_shop(folder, schema, frame.assign(history=column))
        arguments = ("table", str(folder / "log.csv"))
        prepared(folder / "out", *arguments, schema=str(folder / "schema.yaml"))
        found.append([arrays_of(folder / "out", part)[1] for part in PARTS])
    assert found[0] == found[1]
    vocabulary = vocabulary_of(tmp_path / "json/out", "item")
    assert {'a"\\é😀,] ', "7"} <= set(vocabulary)


@pytest.mark.parametrize("cell", ["a|b", '["a", b]', '["a",]', '["\\ud83d"]', "{}", '["a"'])
def test_a_cell_that_is_no_json_list_is_a_bad_value(tmp_path, cell):
    frame = shop()
    frame.loc[100, "towns"] = cell
    write_shop(tmp_path, frame=frame)
    with pytest.raises(
        DataError, match=r"log\.csv: line 102, column towns: .*write a JSON list"
    ) as raised:
        schema = str(tmp_path / "schema.yaml")
        prepared(tmp_path / "out", "table", str(tmp_path / "log.csv"), schema=schema)
    assert "\n" not in str(raised.value).strip()


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"counts_gb": 1e-9, "spool": False}])
def test_fields_that_share_a_vocabulary(tmp_path, options, monkeypatch):
    """Against pandas' counts over all columns of the training part together."""
    monkeypatch.setattr("stampede.data.raw.files.BLOCK_BYTES", 1 << 11)
    write_shop(tmp_path)
    folder = prepared(
        tmp_path / "out", "table", str(tmp_path / "log.csv"),
        schema=str(tmp_path / "schema.yaml"), **options,
    )  # fmt: skip
    frame = pd.read_csv(tmp_path / "log.csv", dtype=str).replace("", np.nan)
    parts = sequential_parts(len(frame), 0.1, 0.1)
    cells = frame["history"].fillna("").str.split("|").str[-4:].explode().replace("", np.nan)
    together = pd.concat([frame["item"], frame["last"], cells])
    train = np.concatenate([parts, parts, np.repeat(parts, cells.index.value_counts(sort=False))])
    rows, size = rows_by_pandas(together, train == 0, 3)
    alone = rows_by_pandas(frame["item"], parts == 0, 3)[1]
    assert size > alone  # some items are frequent enough in all columns together only
    manifest = manifest_of(folder)
    fields = {entry["name"]: entry for entry in manifest["fields"]}
    assert {n: entry["table"] for n, entry in fields.items() if entry["table"]} == {
        "last": "item", "history": "item", "towns": "town",
    }  # fmt: skip
    assert [name for name, entry in fields.items() if entry["pooling"] == "mean"] == ["history"]
    assert {fields[name]["rows"] for name in ("item", "last", "history")} == {size}
    assert {fields[name]["rows"] for name in ("town", "towns")} == {10}
    names, count = list(fields), len(frame)
    item, last, history = rows[:count], rows[count : 2 * count], rows[2 * count :]
    history = history.groupby(level=0, sort=False).apply(list)
    for number, part in enumerate(PARTS):
        found, bags = arrays_of(folder, part)
        ids = dict(zip(names, found["ids"].T, strict=False))
        mask = parts == number
        np.testing.assert_array_equal(ids["item"], item[mask])
        np.testing.assert_array_equal(ids["last"], last[mask])
        assert bags[names.index("history") - len(found["ids"].T)] == history[mask].tolist()
    seen = manifest["source"]["unknown_ids"]["train"]
    assert seen["history"]["unseen"] == pytest.approx(
        (history[parts == 0].explode() == 1).mean(), abs=1e-12
    )


def test_a_file_that_grows_while_it_is_read(made_up, tmp_path):
    path = write(tmp_path / "log.tsv", made_up)
    source = open_source("criteo_kaggle", str(path), PreparationOptions())
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


@pytest.mark.wide
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


def test_random_parts_are_exact_and_by_seed_and_hold_each_row_once(made_up, tmp_path):
    labels = made_up["label"].to_numpy()
    path = write(tmp_path / "log.tsv", made_up.assign(I1=np.arange(3000)))
    found = {}
    for name, seed in (("one", 1), ("again", 1), ("other", 2)):
        folder = prepared(tmp_path / name, "criteo_kaggle", path, split="random", seed=seed)
        found[name] = [arrays_of(folder, part)[0] for part in PARTS]
        assert [len(arrays["label"]) for arrays in found[name]] == [2430, 270, 300]
        assert sum(arrays["label"].sum() for arrays in found[name]) == labels.sum()
    for one, again in zip(found["one"], found["again"], strict=True):
        for name, array in one.items():
            np.testing.assert_array_equal(array, again[name])
    assert not np.array_equal(found["one"][2]["label"], found["other"][2]["label"])
    learned = json.loads((tmp_path / "one/learned/learned.json").read_text())["ranges"]["I1"]
    train = found["one"][0]
    number = train["numbers"][:, 0] * (learned["high"] - learned["low"]) + learned["low"]
    rows = np.round(number).astype(int)
    assert np.all(np.diff(rows) > 0)
    np.testing.assert_array_equal(labels[rows], train["label"])


def test_highfreq_keeps_the_most_frequent_ids(made_up, tmp_path):
    path = write(tmp_path / "log.tsv", made_up)
    folder = prepared(tmp_path / "out", "criteo_kaggle", path, split="highfreq", keep_ids=3)
    plain = prepared(tmp_path / "plain", "criteo_kaggle", path, split="random")
    assert all(entry["rows"] <= 5 for entry in manifest_of(folder)["fields"])
    for part in PARTS:
        few, many = (arrays_of(f, part)[0]["ids"] for f in (folder, plain))
        # The rows of a random split, with every further id in the row of rare ones.
        np.testing.assert_array_equal(few, np.where(many >= 5, 1, many))


@pytest.mark.parametrize(
    "options, test, validation",
    [
        ({"test_values": ["2024-01-02"]}, [2], []),
        ({"test_from": "2024-01-03"}, [3, 4], []),
        ({"test_from": "2024-01-04", "validation_values": ["2024-01-01"]}, [4], [1]),
    ],
)
def test_split_by_column(tmp_path, options, test, validation):
    frame = dated()
    fraction = {} if validation else {"validation_fraction": 0.0}
    folder = table(tmp_path, frame, **BY_DAY, **fraction, **options)
    day = frame["day"].str[-1].astype(int)
    parts = np.where(day.isin(test), 2, np.where(day.isin(validation), 1, 0))
    for number, part in enumerate(PARTS):
        labels = arrays_of(folder, part)[0].get("label", np.empty(0))
        np.testing.assert_array_equal(labels, frame["y"][parts == number])


@pytest.mark.parametrize("value", ["010", "08", "12:00", "2024-03-01", "1_000", "7"])
def test_values_of_a_column_are_taken_as_they_are_written(value):
    options = ["split=by_column", "split_column=c", f"test_from={value}", f"test_values=[{value}]"]
    split = from_key_values(options, Split, "--set")
    assert (split.test_from, split.test_values) == (value, [value])


@pytest.mark.parametrize(
    "options, asked, part",
    [
        ({"test_values": ["02.01.2024"]}, r"test_values=\['02.01.2024'\]", "test"),
        ({"test_from": "2025"}, "test_from='2025'", "test"),
        (
            {"test_from": "2024-01-04", "validation_values": ["1"]},
            r"validation_values=\['1'\]",
            "validation",
        ),
    ],
)
def test_values_that_no_row_has_are_refused(tmp_path, options, asked, part):
    message = rf"no row has {asked} in column 'day', so the {part} part has no rows"
    with pytest.raises(DataError, match=message):
        table(tmp_path, dated(), **BY_DAY, validation_fraction=0.0, **options)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", ["int64", "float64", "text", "csv"])
def test_days_that_are_numbers_compare_as_numbers(tmp_path, kind):
    days = np.repeat(np.arange(1, 13), 10)
    frame = pd.DataFrame({"day": days, "user": days % 5, "y": np.arange(len(days)) % 2})
    frame["day"] = frame["day"].astype(
        str if kind == "text" else "int64" if kind == "csv" else kind
    )
    path = tmp_path / ("log.csv" if kind == "csv" else "log.parquet")
    frame.to_csv(path, index=False) if kind == "csv" else frame.to_parquet(path)
    (tmp_path / "schema.yaml").write_text("label: y\nids: [user]\n")
    split = {"split": "by_column", "split_column": "day", "validation_values": [8]}
    options = {"schema": str(tmp_path / "schema.yaml"), **split}
    prepared(tmp_path / "out", "table", str(path), **options, test_from=9)
    rows = [len(arrays_of(tmp_path / "out", part)[0]["label"]) for part in PARTS]
    assert rows == [70, 10, 40]


def test_split_by_column_with_a_share_for_validation(tmp_path):
    frame = dated(2000)
    folder = table(tmp_path, frame, **BY_DAY, test_from="2024-01-04", validation_fraction=0.2)
    rest = (frame["day"] < "2024-01-04").sum()
    sizes = {part: len(arrays_of(folder, part)[0]["label"]) for part in PARTS}
    assert sizes["train"] + sizes["validation"] == rest
    assert 0.15 * rest < sizes["validation"] < 0.25 * rest


def test_split_by_files(made_up, tmp_path):
    train = write(tmp_path / "a.tsv", made_up[:1000])
    files = {
        "validation_path": write(tmp_path / "b.tsv", made_up[1000:1500]),
        "test_path": write(tmp_path / "c.tsv", made_up[1500:]),
    }
    folder = prepared(tmp_path / "out", "criteo_kaggle", train, split="files", **files)
    check_criteo(folder, made_up, np.repeat([0, 1, 2], [1000, 500, 1500]))


def test_an_empty_training_part_is_refused(tmp_path):
    empty = r"training part has no rows \(bad rows left out: 0\); write --set split=rand"
    with pytest.raises(DataError, match=empty):
        table(tmp_path, dated(50), **BY_DAY, test_from="2024", validation_fraction=0.0)
    assert not (tmp_path / "out").exists()


SCHEMA = "label: y\nids: [user]\nnumbers: [x]\n"


@pytest.fixture
def log(tmp_path):
    (tmp_path / "schema.yaml").write_text(SCHEMA)
    draw = np.random.default_rng(0)
    lines = [f"{i % 2},u{draw.integers(50)},{draw.random():.4f}" for i in range(1000)]
    (tmp_path / "log.csv").write_text("\n".join(["y,user,x", *lines]) + "\n")
    return tmp_path / "log.csv"


def command(log, *further, out="out"):
    folder = log.parent
    return [
        *("table", str(log), "--schema", str(folder / "schema.yaml")),
        *("--out", str(folder / out), *further),
    ]


def test_prepares_verifies_and_reports(log, capsys, monkeypatch):
    # Of so short work a file gets no line.
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    options = ["-s", "split=random", "-s", "test_fraction=0.5", "--set", "features=paper"]
    assert main(command(log, *options)) == 0
    shown, progress = capsys.readouterr()
    assert "pass 2 of 2, writing" in progress and "1,000 rows" in progress
    assert "450 rows" in shown and "500 rows" in shown and "1 id field with 52 rows" in shown
    assert manifest_of(log.parent / "out")["source"]["options"]["test_fraction"] == 0.5
    assert main(["--verify", str(log.parent / "out")]) == 0
    next((log.parent / "out").glob("train-*-ids.npy")).unlink()
    assert main(["--verify", str(log.parent / "out")]) == 2


@pytest.mark.parametrize("moved_by, told", [(50, False), (10**6, True)])
def test_advice_on_a_sequential_split_of_an_unsorted_log(log, capsys, moved_by, told):
    times = np.argsort(np.arange(1000) + moved_by * np.random.default_rng(0).random(1000))
    lines = [f"{i % 2},u{i % 50},{10**9 + time}" for i, time in enumerate(times.tolist())]
    log.write_text("\n".join(["y,user,x", *lines]) + "\n")
    (log.parent / "schema.yaml").write_text("label: y\nids: [user]\ntime: {column: x}\n")
    assert main(command(log)) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert ("of the training rows are newer than half of the test rows" in shown) == told
    by_column = "--set split=by_column --set split_column=x --set test_from=VALUE"
    assert (f"sort the log by 'x', or write {by_column}" in shown) == told
    assert bool(open_prepared(log.parent / "out").advice) == told
    # A random split needs no order.
    assert main(command(log, "--set", "split=random", out="other")) == 0
    assert "newer" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "further, words",
    [
        (["--set", "splt=random"], ["splt: unknown key", "did you mean 'split'?"]),
        (["--set", "split=rnd"], ["split: found 'rnd'", "did you mean"]),
        (["--set", "split"], ["write KEY=VALUE"]),
        (["--set", "split=by_column"], ["needs split_column; write --set split_column=NAME"]),
        (["--set", "split=files"], ["needs test_path; write --set test_path=FILE"]),
        (["--set", "test_path=x.csv"], ["belong to split: files"]),
        (["--schema", "nowhere.yaml"], ["nowhere.yaml: no such file"]),
    ],
)
def test_mistakes_get_a_sentence_and_status_2(log, capsys, further, words):
    assert main(command(log, *further)) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and all(word in error for word in words)
    assert "Traceback" not in error
    assert not (log.parent / "out").exists()


def test_mistakes_in_files(log, capsys):
    log.write_text(log.read_text().replace("\n1,", "\n3,", 1))
    assert main(command(log)) == 2
    assert "line 3, column y: found 3.0; write 0 or 1" in capsys.readouterr().err
    assert sorted(path.name for path in log.parent.iterdir()) == ["log.csv", "schema.yaml"]
    assert main(command(log, "--set", "on_bad_row=skip")) == 0
    place = log.parent / "out/bad_rows.jsonl"
    assert f"left out 1 bad row, listed in {place}\n" in capsys.readouterr().out
    assert place.is_file()
    # Of 1,000 rows.
    log.write_text(log.read_text().replace("\n1,", "\n3,", 99))
    assert main([*command(log, "--set", "on_bad_row=skip"), "--out", f"{log.parent}/few"]) == 0
    assert "they are 10% of all: is the schema right?" in capsys.readouterr().out
    assert main(command(log)) == 2
    assert "already exists" in capsys.readouterr().err


@pytest.mark.parametrize(
    "content, words",
    [
        ("", "is empty, or has only a header line; write the path"),
        ("y,user,x\n", "name the columns in the schema, as in `columns: ["),
        ("y,user,x\n1,anna,0.5\n", "too few rows to divide into parts (1)"),
    ],
)
def test_logs_without_rows(log, capsys, content, words):
    log.write_bytes(content.encode())
    assert main(command(log, out="new/folder/out")) == 2
    assert words in capsys.readouterr().err
    # Neither the folder nor its parents are left.
    assert sorted(path.name for path in log.parent.iterdir()) == ["log.csv", "schema.yaml"]


def test_cells_that_are_missing_because_of_their_text_are_reported(log, capsys):
    rows = ["1,NA,0.5", "0,-,NaN", "0,-,7", "1,null-and-void,"]
    log.write_text("\n".join([log.read_text().strip(), *rows]) + "\n")
    assert main(command(log)) == 0
    told = "treated 4 cells as missing because of the text: user ('-' 2, 'NA' 1), x ('NaN' 1)"
    assert told in capsys.readouterr().out
    # Without the marks, the same texts are ids.
    (log.parent / "schema.yaml").write_text(SCHEMA + 'missing: ["", "NaN"]\n')
    assert main(command(log, out="ids")) == 0
    assert "user" not in manifest_of(log.parent / "ids")["source"]["missing_marks"]


@pytest.mark.wide
def test_no_torch_for_preparing(log):
    program = (
        "import sys; from stampede.data.prepare_command import main; "
        f"assert main({command(log)!r}) == 0; "
        "print('torch' in sys.modules, 'torchrec' in sys.modules)"
    )
    said = subprocess.check_output([sys.executable, "-c", program], text=True)
    assert said.splitlines()[-1] == "False False"


@pytest.mark.slow
def test_a_killed_preparation_is_never_taken_for_complete(log):
    """Killed at several moments: the result is absent or complete, and leftovers are removed."""
    rows = log.read_text().splitlines()
    log.write_text("\n".join([rows[0], *rows[1:] * 200]) + "\n")
    program = [sys.executable, "-m", "stampede", "prepare"]
    for attempt in range(6):
        process = subprocess.Popen(
            [*program, *command(log)],
            env={**os.environ, "POLARS_MAX_THREADS": "1"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        # From the moment that something is written, a little later each time.
        while process.poll() is None and not any(log.parent.glob(".out.unfinished/*")):
            time.sleep(0.005)
        time.sleep(0.05 * attempt)
        process.send_signal(signal.SIGKILL)
        process.wait()
        if (log.parent / "out").exists():
            break
    assert attempt > 0, "the kills came too late to show anything"
    if not (log.parent / "out").exists():
        assert main(command(log)) == 0
    assert main(["--verify", str(log.parent / "out")]) == 0
    labels = [arrays_of(log.parent / "out", part)[0]["label"] for part in PARTS]
    assert np.concatenate(labels).tolist() == [i % 2 for i in range(1000)] * 200
    assert not list(log.parent.glob(".*"))


PEAK = """
import resource
from stampede.data.prepare_command import main
from stampede.data.raw import files
files.BLOCK_BYTES = 1 << 20
assert main({arguments!r}) == 0
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
"""
STARTER = """
import subprocess, sys
sys.exit(subprocess.run([sys.executable, "-c", sys.argv[1]]).returncode)
"""


@pytest.mark.wide
def test_memory_does_not_grow_with_the_rows(log):
    """Ten times the rows of the same ids; the larger log alone would need 60 MB more."""
    lines = log.read_text().splitlines()
    peaks = []
    for times in (500, 5000):
        path = log.parent / f"{times}.csv"
        path.write_text("\n".join([lines[0], *(lines[1:] * times)]) + "\n")
        arguments = ["table", str(path), "--schema", str(log.parent / "schema.yaml")]
        arguments += ["--out", str(log.parent / f"out{times}")]
        # A process begins with the memory of the one that starts it: a small one does.
        program = [sys.executable, "-S", "-c", STARTER, PEAK.format(arguments=arguments)]
        peaks.append(int(subprocess.check_output(program).split()[-1]))
    assert (log.parent / "5000.csv").stat().st_size > 60e6
    assert peaks[1] - peaks[0] < 40, peaks
