"""Descriptions of data against pandas and numpy, and what users get who make mistakes."""

import gzip

import numpy as np
import pandas as pd
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stampede.data.describe import main
from stampede.data.description.collector import collect
from stampede.data.description.guess import guess
from stampede.data.description.inputs import PreparedInput, RawInput
from stampede.data.description.picture import draw
from stampede.data.description.sample import RowSample
from stampede.data.description.slices import SLICES, TIME_WIDTHS, SliceCounter
from stampede.data.description.table import WIDTH
from stampede.data.raw import BadRows
from stampede.data.schema import load_schema
from stampede.data.sources import open_source
from stampede.data.splits import Split
from support.paths import shared
from support.prepared import write_prepared

SCHEMA = """
label: clicked
ids:
  site:
  user: {encode: hash, buckets: 7}
  tags: {separator: "|"}
numbers: {price: {}}
time: {column: seen}
"""


def made_up(rows, seed=0):
    """A log with missing values, rare ids, cells of several ids, and a label rate that rises."""
    draw = np.random.default_rng(seed)
    frame = pd.DataFrame({"clicked": (draw.random(rows) < np.linspace(0.1, 0.5, rows)).astype(int)})
    frame["site"] = pd.Series(draw.zipf(1.5, rows) % 300).map("s{}".format)
    frame["site"] = frame["site"].mask(draw.random(rows) < 0.1)
    frame["user"] = pd.Series(draw.integers(0, rows, rows)).map("u{}".format)
    tags = [[f"t{tag}" for tag in draw.integers(0, 60, draw.integers(0, 4))] for _ in range(rows)]
    frame["tags"] = ["|".join(cell) for cell in tags]
    frame["price"] = np.round(draw.lognormal(2, 1.5, rows), 3)
    frame["price"] = frame["price"].mask(draw.random(rows) < 0.2)
    frame["seen"] = 1_600_000_000 + np.sort(draw.integers(0, 40 * 3600, rows))
    return frame


@pytest.fixture
def log(tmp_path):
    """Three files of one log, and the whole of it; each file is read as a chunk of its own."""
    frame = made_up(3000)
    for i in range(3):
        frame[i * 1000 : (i + 1) * 1000].to_csv(tmp_path / f"log_{i}.csv", index=False)
    (tmp_path / "schema.yaml").write_text(SCHEMA)
    return tmp_path, frame


def raw_input(folder, limit=None, **split):
    source = open_source(
        "table",
        str(folder / "log_*.csv"),
        Split.model_validate(split),
        schema=str(folder / "schema.yaml"),
    )
    return RawInput(source, BadRows("error"), limit)


def values_of(frame, name):
    """A column's values, one per row or several; a row without one has NaN."""
    column = frame[name].replace("", np.nan)
    return column.str.split("|").explode() if name == "tags" else column


def check_against_pandas(found, frame, parts):
    """`parts` is the part of each row of the frame."""
    np.testing.assert_array_equal(found.rows, np.bincount(parts, minlength=3))
    np.testing.assert_array_equal(found.positives, np.bincount(parts, frame["clicked"], 3))
    assert [column.name for column in found.ids] == ["site", "user", "tags"]
    for column in found.ids:
        values = values_of(frame, column.name)
        counts = values.value_counts()
        assert column.distinct == len(counts)
        for top in (1, 10, 100, 1000):
            expected = counts.iloc[:top].sum() / counts.sum()
            assert column.coverage(top) == pytest.approx(expected)
        assert counts[column.top].tolist() == counts.iloc[:3].tolist()
        known = set(values_of(frame[parts == 0], column.name).dropna())
        for part in range(3):
            within = values_of(frame[parts == part], column.name)
            assert column.by_part.missing_share(part) == pytest.approx(within.isna().mean())
            unseen = (~within.isin(known) & within.notna()).mean()
            assert column.by_part.unseen_share(part) == pytest.approx(unseen)
    assert any(column.by_part.unseen[2] for column in found.ids)
    (price,) = found.numbers
    present = frame["price"].dropna()
    assert (price.range.low, price.range.high) == (present.min(), present.max())
    assert price.range.mean == pytest.approx(present.mean())
    expected = np.quantile(present, [0.25, 0.5, 0.75, 0.99], method="inverted_cdf")
    np.testing.assert_array_equal(price.quantiles, expected)
    for part in range(3):
        missing = frame["price"][parts == part].isna().mean()
        assert price.by_part.missing_share(part) == pytest.approx(missing)


def test_a_log_against_pandas(log):
    folder, frame = log
    # The last tenth is for the test, the last tenth of the rest for validation.
    parts = np.repeat([0, 1, 2], [2430, 270, 300])
    check_against_pandas(collect(raw_input(folder)), frame, parts)


def test_a_random_split_against_pandas(log):
    folder, frame = log
    parts = np.concatenate([piece.parts for piece in raw_input(folder, split="random").pieces()])
    assert 0 < parts[:1000].sum() < len(parts)
    check_against_pandas(collect(raw_input(folder, split="random")), frame, parts)


@pytest.mark.parametrize("limit", [1, 30, 1000, 1700, 5000])
def test_the_first_rows_only(log, limit):
    folder, frame = log
    found = collect(raw_input(folder, limit))
    rows = min(limit, 3000)
    assert found.rows.sum() == rows
    assert found.positives.sum() == frame["clicked"][:rows].sum()
    assert found.ids[0].distinct == frame["site"][:rows].nunique()
    # The parts are those of a log that has no more rows.
    assert found.rows[2] == rows - int(0.9 * rows)


def test_label_rate_over_time(log):
    folder, frame = log
    slices = collect(raw_input(folder)).slices
    assert slices.by_time
    assert slices.width == 3600
    by_hour = frame.groupby(frame["seen"] // 3600 * 3600)["clicked"].agg(["size", "sum"])
    assert slices.table["start"].to_list() == by_hour.index.tolist()
    assert slices.table["rows"].to_list() == by_hour["size"].tolist()
    assert slices.table["positives"].to_list() == by_hour["sum"].tolist()


@given(
    places=st.lists(st.integers(-(10**6), 10**10), min_size=1, max_size=200),
    chunks=st.integers(1, 4),
)
@settings(max_examples=60, deadline=None)
def test_slices_hold_all_rows_and_are_no_wider_than_needed(places, chunks):
    counter = SliceCounter(TIME_WIDTHS)
    label = np.arange(len(places)) % 2
    for chunk in np.array_split(np.arange(len(places)), chunks):
        counter.add(pl.Series(np.array(places)[chunk]), pl.Series(label[chunk]))
    found = counter.slices(by_time=True)
    starts = np.array(places) // found.width * found.width
    expected = pd.DataFrame({"label": label}).groupby(starts)["label"].agg(["size", "sum"])
    assert found.table["start"].to_list() == expected.index.tolist()
    assert found.table["rows"].to_list() == expected["size"].tolist()
    assert found.table["positives"].to_list() == expected["sum"].tolist()

    def spanned(width):
        return max(places) // width - min(places) // width + 1

    assert spanned(found.width) <= SLICES or found.width == TIME_WIDTHS[-1]
    level = TIME_WIDTHS.index(found.width)
    assert level == 0 or spanned(TIME_WIDTHS[level - 1]) > SLICES


def test_slices_of_many_times_stay_few():
    counter = SliceCounter(TIME_WIDTHS)
    draw = np.random.default_rng(0)
    times = draw.integers(0, 30 * 86400, (5, 20_000))
    for chunk in times:
        counter.add(pl.Series(chunk), pl.Series(np.ones(20_000)))
    found = counter.slices(by_time=True)
    assert found.width == 86400
    np.testing.assert_array_equal(found.table["rows"], np.bincount(times.ravel() // 86400))


@given(sizes=st.lists(st.integers(0, 300), min_size=1, max_size=8), most=st.integers(1, 200))
@settings(max_examples=60, deadline=None)
def test_a_sample_is_a_part_of_the_rows(sizes, most):
    sample = RowSample(most)
    done = 0
    for size in sizes:
        sample.add(pl.DataFrame({"row": np.arange(done, done + size)}))
        done += size
    rows = sample.frame()["row"].to_list()
    assert rows == sorted(set(rows)) and set(rows) <= set(range(done))
    assert len(rows) <= most
    assert sample.whole == (done <= most)
    assert not sample.whole or len(rows) == done


def test_a_sample_is_fair():
    kept = []
    for seed in range(30):
        sample = RowSample(1000, seed)
        for start in range(0, 20_000, 500):
            sample.add(pl.DataFrame({"row": np.arange(start, start + 500)}))
        kept.append(np.histogram(sample.frame()["row"], 10, (0, 20_000))[0])
    tenths = np.sum(kept, axis=0) / np.sum(kept)
    assert np.abs(tenths - 0.1).max() < 0.01


# Prepared folders


def prepared(folder, rows=500, **described):
    """Two fields, the first with an unseen row, and one of several ids; row 0 is missing."""
    draw = np.random.default_rng(3)
    parts = {}
    for part, offset in (("train", 0), ("validation", 10), ("test", 20)):
        lengths = draw.integers(0, 4, rows)
        parts[part] = {
            "ids": draw.integers(0, 30 + offset, (rows, 2), dtype=np.int32),
            "numbers": draw.random((rows, 1), dtype=np.float32),
            "label": draw.integers(0, 2, rows).astype(np.uint8),
            "offsets_0": np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
            "values_0": draw.integers(0, 40 + offset, lengths.sum(), dtype=np.int32),
        }
    fields = {"a": (60, False), "b": (60, False), "many": (60, True)}
    write_prepared(folder, parts, fields, shard_rows=200, **described)
    manifest = (folder / "manifest.json").read_text()
    entry = '"name":"a","rows":60,"missing_row":0,"unseen_row":null'
    assert entry in manifest
    (folder / "manifest.json").write_text(manifest.replace(entry, entry[:-4] + "1"))
    return parts


def test_a_prepared_folder_against_numpy(tmp_path):
    parts = prepared(tmp_path / "prepared")
    found = collect(PreparedInput(tmp_path / "prepared", None))
    assert found.rows.tolist() == [500] * 3
    assert found.positives.tolist() == [int(arrays["label"].sum()) for arrays in parts.values()]
    a, b, many = found.ids
    for j, column in ((0, a), (1, b)):
        every = [arrays["ids"][:, j] for arrays in parts.values()]
        for part, ids in enumerate(every):
            assert column.by_part.missing_share(part) == np.mean(ids == 0)
            lacking = ids == 1 if j == 0 else ~np.isin(ids, every[0]) & (ids != 0)
            assert column.by_part.unseen_share(part) == np.mean(lacking)
        ids, counts = np.unique(np.concatenate(every), return_counts=True)
        counts = counts[ids > (1 if j == 0 else 0)]
        assert column.distinct == len(counts)
        present = (np.concatenate(every) != 0).sum()
        assert column.coverage(10) == pytest.approx(np.sort(counts)[-10:].sum() / present)
    for part, arrays in enumerate(parts.values()):
        empty = (np.diff(arrays["offsets_0"]) == 0).sum()
        missing = (arrays["values_0"] == 0).sum() + empty
        share = missing / (len(arrays["values_0"]) + empty)
        assert many.by_part.missing_share(part) == pytest.approx(share)
    (number,) = found.numbers
    values = np.concatenate([arrays["numbers"] for arrays in parts.values()])
    assert number.range.mean == pytest.approx(values.mean())
    assert number.by_part.missing_share(0) is None
    assert not found.slices.by_time
    labels = np.concatenate([arrays["label"] for arrays in parts.values()])
    assert found.slices.width == 32
    assert found.slices.table["positives"].to_list() == [
        int(labels[start : start + 32].sum()) for start in range(0, 1500, 32)
    ]


def test_the_first_rows_of_each_part(tmp_path):
    parts = prepared(tmp_path / "prepared")
    found = collect(PreparedInput(tmp_path / "prepared", 250))
    assert found.rows.tolist() == [250] * 3
    assert found.positives.tolist() == [arrays["label"][:250].sum() for arrays in parts.values()]


def test_texts_of_a_prepared_log_are_those_of_the_log(log, tmp_path, capsys):
    folder, frame = log
    from stampede.data.preparation import PreparationOptions, prepare

    options = PreparationOptions()
    source = open_source(
        "table", str(folder / "log_*.csv"), options, schema=str(folder / "schema.yaml")
    )
    prepare(source, options, tmp_path / "prepared")
    data = PreparedInput(tmp_path / "prepared", None)
    found = {column.name: column for column in collect(data).ids}
    assert data.texts(found["site"]) == frame["site"].value_counts().index[:3].tolist()
    assert all(text.startswith("row ") for text in data.texts(found["user"]))
    raw = {column.name: column for column in collect(raw_input(folder)).ids}
    for name in ("site", "tags"):
        for part in range(3):
            for what in ("missing_share", "unseen_share"):
                expected = getattr(raw[name].by_part, what)(part)
                assert getattr(found[name].by_part, what)(part) == pytest.approx(expected)


@pytest.mark.parametrize("damage", ["gone", "short", "manifest"])
def test_a_damaged_folder(tmp_path, damage, capsys):
    folder = tmp_path / "prepared"
    prepared(folder)
    path = folder / ("manifest.json" if damage == "manifest" else "test-1-label.npy")
    path.unlink() if damage == "gone" else path.write_bytes(path.read_bytes()[:100])
    assert main([str(folder), "--out", str(tmp_path / "out")]) == 2
    assert f"error: {path}: " in capsys.readouterr().err


# Guesses


def criteo_rows(rows):
    draw = np.random.default_rng(0)
    for _ in range(rows):
        numbers = [str(value) for value in draw.integers(0, 50, 13)]
        yield "\t".join(["1", *numbers, *(f"{value:08x}" for value in draw.integers(0, 9, 26))])


def test_known_logs_are_known(tmp_path):
    rows = "\n".join(criteo_rows(3)) + "\n"
    for name in ("train.txt", "day_0", "day_1"):
        (tmp_path / name).write_text(rows)
    with gzip.open(tmp_path / "train.tsv.gz", "wt") as file:
        file.write(rows)
    assert guess([tmp_path / "train.txt"]).kind == "criteo_kaggle"
    assert guess([tmp_path / "train.tsv.gz"]).kind == "criteo_kaggle"
    assert guess([tmp_path / "day_0", tmp_path / "day_1"]).kind == "criteo_1tb"
    header = "id,click,hour,C1,banner_pos,site_id,device_ip,C21"
    (tmp_path / "train.csv").write_text(f"{header}\n1,0,14102100,1,0,a,b,c\n")
    assert guess([tmp_path / "train.csv"]).kind == "avazu"


def test_a_table_is_guessed_from_its_types(log):
    folder, frame = log
    found = guess([folder / "log_0.csv"])
    assert found.kind == "table"
    assert found.schema == {
        "separator": ",",
        "label": "clicked",
        "ids": {"site": {}, "user": {}, "tags": {"separator": "|"}, "seen": {}},
        "numbers": {"price": {}},
    }
    times = pd.to_datetime(frame.pop("seen"), unit="s")
    frame = frame.assign(timestamp=times.dt.strftime("%Y-%m-%d %H:%M:%S"), Seite=frame["site"])
    frame = frame.rename(columns={"Seite": "the site"})
    frame[:50].to_csv(folder / "semicolon.csv", index=False, sep=";")
    found = guess([folder / "semicolon.csv"])
    assert found.schema["separator"] == ";"
    assert found.schema["time"] == {"column": "timestamp", "format": "%Y-%m-%d %H:%M:%S"}
    assert found.schema["ids"]["the_site"] == {"column": "the site"}
    frame["timestamp"] = times
    frame["tags"] = frame["tags"].str.split("|")
    frame.to_parquet(folder / "log.parquet")
    found = guess([folder / "log.parquet"])
    assert found.schema["time"] == {"column": "timestamp"}
    assert found.schema["ids"]["tags"] == {"separator": "|"}


@pytest.mark.parametrize(
    "content, sentence",
    [
        ("a,b\n1,2\n", "cannot tell which column is the label: found 'a', 'b'"),
        ("label,b\n3.5,2\n", "the label column 'label' holds 3.5; write a schema"),
        ("label,b\n1,2.5\n", "no column of ids"),
        ("1,2\n3,4\n", "line 1 is no header"),
        ("", "is empty"),
    ],
)
def test_no_guess(tmp_path, content, sentence, capsys):
    path = tmp_path / "log.csv"
    path.write_text(content)
    assert main([str(path), "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {path}: ")
    assert sentence in error
    assert not (tmp_path / "out").exists()


# The command


def test_the_command_writes_a_table_and_a_page(log, tmp_path, capsys):
    folder, _ = log
    out = tmp_path / "out"
    files = [str(folder / f"log_{i}.csv") for i in range(3)]
    assert main([*files, "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    text = (out / "description.txt").read_text()
    assert text in printed
    assert max(map(len, text.splitlines())) <= WIDTH
    (site,) = (line for line in text.splitlines() if line.startswith("site  ") and "ids" in line)
    frame = pd.concat(map(pd.read_csv, files))
    assert site.split()[2] == str(frame["site"].nunique())
    assert site.split()[3] == f"{frame['site'].isna().mean():.2%}"
    assert site.split()[-1] == frame["site"].value_counts().index[0]
    assert (out / "description.png").read_bytes().startswith(b"\x89PNG")
    # The guessed schema can be given.
    assert list(load_schema(out / "schema.yaml").ids) == ["site", "user", "tags", "seen"]
    assert main([*files, "--out", str(out), "--schema", str(folder / "schema.yaml")]) == 0
    text = (out / "description.txt").read_text()
    assert "label rate over time: 41 slices of 1 hour from 2020-09-13 12:00" in text
    assert "hash 7" in text


def test_bad_rows_are_left_out_and_counted(log, tmp_path, capsys):
    folder, _ = log
    path = folder / "log_1.csv"
    lines = path.read_text().splitlines()
    lines[500] = "maybe" + lines[500][1:]
    path.write_text("\n".join(lines) + "\n")
    command = [str(folder / "log_*.csv"), "--out", str(tmp_path / "out")]
    command += ["--schema", str(folder / "schema.yaml")]
    assert main(command) == 2
    assert f"{path}: line 501, column clicked: found 'maybe'" in capsys.readouterr().err
    assert main([*command, "--on-bad-row", "skip"]) == 0
    text = (tmp_path / "out" / "description.txt").read_text()
    assert "1 bad rows were left out" in text
    assert "2,999" in text
    assert len((tmp_path / "out" / "bad_rows.jsonl").read_text().splitlines()) == 1


@pytest.mark.parametrize(
    "options, sentence",
    [
        (["--set", "splt=random"], "did you mean 'split'?"),
        (["--set", "random"], "write KEY=VALUE"),
        (["--kind", "avazu", "--schema", "x.yaml"], "--schema belongs to --kind table"),
        (["--schema", "absent.yaml"], "absent.yaml: no such file"),
        (["--kind", "table"], "a table needs a schema file"),
    ],
)
def test_mistakes_on_the_command_line(log, tmp_path, options, sentence, capsys):
    folder, _ = log
    command = [str(folder / "log_0.csv"), "--out", str(tmp_path / "out"), *options]
    assert main(command) == 2
    assert sentence in capsys.readouterr().err


def test_a_prepared_folder_takes_no_options_of_logs(tmp_path, capsys):
    prepared(tmp_path / "prepared")
    folder, out = str(tmp_path / "prepared"), str(tmp_path / "out")
    assert main([folder, "--out", out, "--kind", "avazu"]) == 2
    assert "is a prepared folder; give it alone" in capsys.readouterr().err
    assert main([folder, "--out", out]) == 0
    assert main([folder, "--out", str(tmp_path / "prepared" / "manifest.json")]) == 2
    assert "choose another folder" in capsys.readouterr().err


def test_a_page_of_many_odd_columns(tmp_path):
    rows = 40
    frame = pd.DataFrame({"label": np.arange(rows) % 2})
    for i in range(55):
        frame[f"an_id_with_a_long_name_{i}"] = "x" if i else np.nan
        frame[f"number_{i}"] = [np.nan, -(10.0 ** (i % 30)), 0.5, 10.0 ** (i % 30)][i % 4]
    frame.to_csv(tmp_path / "log_0.csv", index=False)
    (tmp_path / "schema.yaml").write_text(
        f"label: label\nids: {[name for name in frame if name.startswith('an')]}\n"
        f"numbers: {[name for name in frame if name.startswith('nu')]}\n"
    )
    statistics = collect(raw_input(tmp_path))
    assert statistics.ids[0].distinct == 0 and statistics.ids[0].coverage(1) is None
    assert statistics.numbers[0].quantiles == []
    draw("many", statistics, tmp_path / "page.png")
    assert (tmp_path / "page.png").stat().st_size > 10_000


def test_real_rows_against_pandas(tmp_path):
    path = shared("data/avazu_20k.csv.gz")
    frame = pd.read_csv(path, dtype=str)
    source = open_source("avazu", str(path), Split())
    found = collect(RawInput(source, BadRows("error"), None))
    trained = frame[: int(0.9 * len(frame)) - int(0.1 * int(0.9 * len(frame)))]
    test = frame[int(0.9 * len(frame)) :]
    assert found.rows[[0, 2]].tolist() == [len(trained), len(test)]
    for column in found.ids:
        assert column.distinct == frame[column.name].nunique()
        unseen = (~test[column.name].isin(set(trained[column.name]))).mean()
        assert column.by_part.unseen_share(2) == pytest.approx(unseen)
    hours = pd.to_datetime(frame["hour"], format="%y%m%d%H").dt.floor("6h")
    clicks = frame["click"].astype(int).groupby(hours).agg(["size", "sum"])
    assert found.slices.width == 6 * 3600
    assert found.slices.table["start"].to_list() == [int(time.timestamp()) for time in clicks.index]
    assert found.slices.table["positives"].to_list() == clicks["sum"].tolist()
