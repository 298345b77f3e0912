"""`python -m stampede.data.describe`: guesses, statistics against pandas, and what is printed."""

import gzip
import os
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest
from sklearn.metrics import roc_auc_score

from stampede.data.describe import main
from stampede.data.description.guess import guess
from stampede.data.description.statistics import collect, read_rows
from stampede.data.options import Split
from stampede.data.raw.rows import BadRows
from stampede.data.schema.schema import load_schema
from stampede.data.sources import open_source
from support.paths import ROOT
from support.prepared import write_small

SCHEMA = """
label: clicked
ids:
  site:
  user: {encode: hash, buckets: 7}
  tags: {separator: "|"}
numbers: {price: {}}
time: {column: seen}
"""


@pytest.fixture
def log(tmp_path):
    """A log with missing values, rare ids, cells of several ids, and a label rate that rises.

    The folder of its three files, each read as a chunk of its own, and the whole of it.
    """
    draw, rows = np.random.default_rng(0), 3000
    frame = pd.DataFrame({"clicked": (draw.random(rows) < np.linspace(0.1, 0.5, rows)).astype(int)})
    frame["site"] = pd.Series(draw.zipf(1.5, rows) % 300).map("s{}".format)
    frame["site"] = frame["site"].mask(draw.random(rows) < 0.1)
    frame["user"] = pd.Series(draw.integers(0, rows, rows)).map("u{}".format)
    tags = [[f"t{tag}" for tag in draw.integers(0, 60, draw.integers(0, 4))] for _ in range(rows)]
    frame["tags"] = ["|".join(cell) for cell in tags]
    frame["price"] = np.round(draw.lognormal(2, 1.5, rows), 3)
    frame["price"] = frame["price"].mask(draw.random(rows) < 0.2)
    frame["seen"] = 1_600_000_000 + np.sort(draw.integers(0, 40 * 3600, rows))
    for i in range(3):
        frame[i * 1000 : (i + 1) * 1000].to_csv(tmp_path / f"log_{i}.csv", index=False)
    (tmp_path / "schema.yaml").write_text(SCHEMA)
    return tmp_path, frame


def described(folder, limit=None, **split):
    """Statistics of the log in a folder, and the part of each row."""
    log, schema = str(folder / "log_*.csv"), str(folder / "schema.yaml")
    split = Split.model_validate(split)
    source = open_source("table", log, split, schema=schema, features="paper")
    (folder / "spool").mkdir()
    rows = read_rows(source, BadRows("error"), limit, folder / "spool")
    return collect(rows), rows.frame.select("#part").collect()["#part"].to_numpy()


def values_of(frame, name):
    """A column's values, one per row or several; a row without one has NaN."""
    column = frame[name].replace("", np.nan)
    return column.str.split("|").explode() if name == "tags" else column


def auc_by_hand(frame, parts, name):
    """Of the click rates that a column's ids have in the training part, drawn to the mean."""
    values = values_of(frame, name).fillna("missing").rename("id")
    rows = values.to_frame().join(frame["clicked"]).join(pd.Series(parts, name="part"))
    train, test = rows[rows["part"] == 0], rows[rows["part"] == 2]
    seen, mean = train.groupby("id")["clicked"].agg(["sum", "size"]), train["clicked"].mean()
    rate = (seen["sum"] + 20 * mean) / (seen["size"] + 20)
    return roc_auc_score(test["clicked"], test["id"].map(rate).fillna(mean))


@pytest.mark.parametrize("split", ["sequential", "random"])
def test_a_log_against_pandas(log, split):
    folder, frame = log
    found, parts = described(folder, split=split)
    if split == "sequential":
        # The last tenth is for the test, the last tenth of the rest for validation.
        assert parts.tolist() == np.repeat([0, 1, 2], [2430, 270, 300]).tolist()
    np.testing.assert_array_equal(found.rows, np.bincount(parts, minlength=3))
    np.testing.assert_array_equal(found.clicks, np.bincount(parts, frame["clicked"], 3))
    assert [column.name for column in found.ids] == ["site", "user", "tags"]
    for column in found.ids:
        values = values_of(frame, column.name)
        counts = values.value_counts()
        assert column.distinct == len(counts)
        for top in (1, 10, 100, 1000):
            expected = counts.iloc[:top].sum() / counts.sum()
            assert column.coverage(top) == pytest.approx(expected)
        assert counts[column.top].tolist() == counts.iloc[:10].tolist()
        clicks = frame["clicked"].loc[values.index].groupby(values.to_numpy()).sum()
        assert column.rates[:, 0].tolist() == counts[column.top].tolist()
        assert column.rates[:, 1].tolist() == clicks[column.top].tolist()
        known = set(values_of(frame[parts == 0], column.name).dropna())
        for part in range(3):
            within = values_of(frame[parts == part], column.name)
            assert column.share("missing", part) == pytest.approx(within.isna().mean())
            unseen = (~within.isin(known) & within.notna()).mean()
            assert column.share("unseen", part) == pytest.approx(unseen)
        assert column.alone == pytest.approx(auc_by_hand(frame, parts, column.name))
    assert any(column.unseen[2] for column in found.ids)
    (price,) = found.numbers
    # Numbers are read as float32.
    frame["price"] = frame["price"].astype("float32").astype("float64")
    present, missing = frame["price"].dropna(), frame["price"].isna()
    quantiles = np.quantile(present, [0.25, 0.5, 0.75, 0.99], method="nearest")
    expected = [present.mean(), present.min(), *quantiles, present.max()]
    np.testing.assert_allclose(price.summary, expected, rtol=1e-12)
    # In row 0 those without a price, then the quarters of prices.
    quarters = np.where(missing, 0, np.searchsorted(quantiles[:3], frame["price"]) + 1)
    expected = np.stack([np.bincount(quarters), np.bincount(quarters, frame["clicked"])], 1)
    np.testing.assert_array_equal(price.rates, expected)
    for part in range(3):
        assert price.share("missing", part) == pytest.approx(missing[parts == part].mean())
    edges, rows, _ = price.histogram
    np.testing.assert_array_equal(rows, np.histogram(present, edges)[0])
    hours = frame.groupby(frame["seen"] // 3600 * 3600)["clicked"].agg(["size", "sum"])
    assert found.by_time and found.width == 3600
    assert found.slices.rows() == list(hours.itertuples(name=None))


@pytest.mark.parametrize("limit", [1, 1700])
def test_the_first_rows(log, limit):
    folder, frame = log
    found, parts = described(folder, limit)
    assert found.rows.sum() == limit and found.clicks.sum() == frame["clicked"][:limit].sum()
    train = int(0.9 * limit)
    kept = [train - int(0.1 * train), int(0.1 * train), limit - train]
    assert np.bincount(parts, minlength=3).tolist() == kept


def test_known_logs_are_known(tmp_path):
    criteo = 3 * ("\t".join(["1", *["5"] * 13, *["68fd1e64"] * 26]) + "\n")
    avazu = "id,click,hour,C1,banner_pos,site_id,device_ip,C21\n1,0,14102100,1,0,a,b,c\n"
    for kind, text, *names in (
        ("criteo_kaggle", criteo, "train.txt"),
        ("criteo_kaggle", criteo, "train.tsv.gz"),
        ("criteo_1tb", criteo, "day_0", "day_1"),
        ("avazu", avazu, "train.csv"),
    ):
        for name in names:
            is_compressed = name.endswith("gz")
            content = gzip.compress(text.encode()) if is_compressed else text.encode()
            (tmp_path / name).write_bytes(content)
        assert guess([tmp_path / name for name in names]).kind == kind


def test_a_table_is_guessed_from_its_types(log):
    folder, frame = log
    found = guess([folder / "log_0.csv"])
    assert found.kind == "table"
    assert "time 'seen'" in found.reason[0]
    assert found.schema == {
        "separator": ",",
        "label": "clicked",
        "ids": {"site": {}, "user": {}, "tags": {"separator": "|"}},
        "numbers": {"price": {}},
        "time": {"column": "seen"},
    }
    times = pd.to_datetime(frame.pop("seen"), unit="s")
    frame["timestamp"] = times.dt.strftime("%Y-%m-%d %H:%M:%S")
    frame["the site"] = frame["site"]
    frame[:50].to_csv(folder / "semicolon.csv", index=False, sep=";")
    found = guess([folder / "semicolon.csv"])
    assert found.schema["separator"] == ";"
    assert found.schema["time"] == {"column": "timestamp", "format": "%Y-%m-%d %H:%M:%S"}
    assert found.schema["ids"]["the_site"] == {"column": "the site"}
    frame["timestamp"], frame["tags"] = times, frame["tags"].str.split("|")
    frame.to_parquet(folder / "log.parquet")
    found = guess([folder / "log.parquet"])
    assert found.schema["time"] == {"column": "timestamp"}
    assert found.schema["ids"]["tags"] == {"separator": "|"}


def test_the_features_that_auto_will_choose_are_said_with_their_keys(log, tmp_path):
    _, frame = log
    frame.assign(rank=range(len(frame)), rate=0.5).to_csv(tmp_path / "log.csv", index=False)
    (tmp_path / "schema.yaml").write_text(
        "label: clicked\n"
        "ids: {site: {}, user: {min_count: 3}, tags: {separator: '|'}}\n"
        "numbers: {price: {}, rank: {}, rate: {transform: [minmax], bins: 5}}\n"
        "time: {column: seen}\n"
    )
    out = tmp_path / "out"
    given = [str(tmp_path / "log.csv"), "--out", str(out)]
    assert main([*given, "--schema", str(tmp_path / "schema.yaml")]) == 0
    # Prices have a long tail to the right. What the schema has decided is not chosen.
    assert (
        "ids seen fewer than 1 or 3 times share a row; price by log1p, standard; rank by standard; "
        "rate by minmax; quantile bins as ids: price_bin, rank_bin, rate_bin; of the time: "
        "hour_of_day, weekday"
    ) in " ".join((out / "description.txt").read_text().split())
    # The proposed schema has them, too.
    assert main(given) == 0
    proposed = (out / "schema.yaml").read_text()
    assert "# data.features=auto, where a key is absent here" in proposed
    assert "price_bin" in proposed
    assert "label" in load_schema(out / "schema.yaml").model_dump()


@pytest.mark.parametrize(
    "content, sentence",
    [
        ("label,b\n", "has only a header line"),
        ("label,b\n,x\n1,y\n", "column label: found nothing; write 0 or 1"),
        ("label,b\n1," + "x\0y\n", "line 2: found a NUL byte"),
        ("a" * 2_000_000 + ",b\n1,2\n", "cannot tell which column is the label: found 'aaaa"),
        ("1,2\n3,4\n", "column is the label: found '1', '2', none is named label"),
        ("label,b\n1,2.5\n", "no column of ids"),
        ("", "is empty"),
    ],
    ids=lambda value: None if len(value) < 100 else "long",
)
def test_what_cannot_be_described(tmp_path, content, sentence, capsys):
    path = tmp_path / "log.csv"
    path.write_bytes(content.encode())
    assert main([str(path), "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert f"error: {path}: " in error and sentence in error and len(error) < 5000
    assert not (tmp_path / "out").exists()


def test_the_command_writes_a_table_and_a_page(log, tmp_path, capsys):
    folder, frame = log
    out = tmp_path / "out"
    files = [str(folder / f"log_{i}.csv") for i in range(3)]
    assert main([*files, "--out", str(out)]) == 0
    text = (out / "description.txt").read_text()
    assert text in capsys.readouterr().out
    (site,) = (line for line in text.splitlines() if line.startswith("site  ") and "ids" in line)
    (rates,) = (line for line in text.splitlines() if line.startswith("site  ") and " s1 " in line)
    assert site.split()[2] == str(frame["site"].nunique())
    assert site.split()[3] == f"{frame['site'].isna().mean():.2%}"
    top = frame["site"].value_counts().index[0]
    clicked = frame["clicked"][frame["site"] == top].mean()
    assert rates.split()[1] == top and rates.split()[3] == f"{clicked:.3f}"
    assert (out / "description.png").read_bytes().startswith(b"\x89PNG")
    # The guessed schema can be given.
    assert list(load_schema(out / "schema.yaml").ids) == ["site", "user", "tags"]
    assert main([*files, "--out", str(out), "--schema", str(folder / "schema.yaml")]) == 0
    text = (out / "description.txt").read_text()
    for words in ("over time (UTC)", "from 2020-09-13 12:00", "hash 7"):
        assert words in text


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
    # Rows after the first thousand, all of them in the file before, are not read.
    assert main([*command, "--rows", "1000"]) == 0
    assert main([*command, "--on-bad-row", "skip"]) == 0
    text = (tmp_path / "out" / "description.txt").read_text()
    assert "left out 1 bad row, listed" in text and "2,999" in text
    assert len((tmp_path / "out" / "bad_rows.jsonl").read_text().splitlines()) == 1


def test_mistakes_on_the_command_line(log, tmp_path, capsys):
    folder = write_small(tmp_path / "prepared")
    path, out = log[0] / "log_0.csv", tmp_path / "out"
    for given, to, options, sentence in (
        (path, out, ["--kind", "avazu", "--schema", "x.yaml"], "--schema belongs to --kind table"),
        (path, out, ["--kind", "table"], "a table needs a schema file"),
        (path, folder / "manifest.json", [], "choose another folder"),
        (folder, out, [], "is a prepared folder; describe the log's files"),
    ):
        assert main([str(given), "--out", str(to), *options]) == 2
        assert sentence in capsys.readouterr().err


def printed_of(folder, frame, capsys):
    """What is printed of a log, all of whose columns but the label are ids or numbers."""
    frame.to_csv(folder / "log.csv", index=False)
    numbers = [name for name in frame if name.startswith("number")]
    ids = [name for name in frame if name not in ("label", "time", *numbers)]
    timed = "time: {column: time}\n" * ("time" in frame)
    (folder / "schema.yaml").write_text(f"label: label\nids: {ids}\nnumbers: {numbers}\n{timed}")
    given = [str(folder / "log.csv"), "--schema", str(folder / "schema.yaml")]
    assert main([*given, "--out", str(folder / "out")]) == 0
    return capsys.readouterr().out


def test_advice(tmp_path, capsys):
    draw, rows = np.random.default_rng(0), 2000
    label = draw.integers(0, 2, rows)
    days = np.sort(draw.choice(5, rows, p=[0.1, 0.1, 0.55, 0.15, 0.1]))
    frame = pd.DataFrame({
        "label": label,
        "time": 1_600_000_000 // 86400 * 86400 + days * 86400 + draw.integers(0, 86400, rows),
        "hour": [f"h{row // 100}" for row in range(rows)],
        "user": draw.integers(0, 1200, rows),
        "request": [f"r{row}" for row in draw.permutation(rows)],
        "landing_page": np.where(label, "bought", ""),
        "country": "se",
        "nothing": np.nan,
        "site": draw.integers(0, 9, rows),
        "number_of_seconds": np.where(label, draw.random(rows), np.nan),
        "number_of_nothing": np.nan,
        "number_one": 1,
        "number_good": draw.random(rows),
    })  # fmt: skip
    said = " ".join(printed_of(tmp_path, frame, capsys).partition("\nadvice\n")[2].split())
    for words in (
        "hour 100%, request 100%: this share of the test ids is not in the training part; leave it",
        "for a time, use hour_of_day and weekday, as data.features=auto does",
        "min_count=2 or more trains the row that they share",
        "landing_page 1.000, number_of_seconds 1.000: this test AUC alone suggests that",
        "nothing, number_of_nothing: missing in all rows; leave it out",
        "country, number_one: the same in all rows; leave it out",
    ):
        assert words in said, said
    assert "site" not in said and "number_good" not in said
    # One large day is in order; days in any order are not.
    assert "newer than half" not in said
    shuffled = frame.assign(time=draw.permutation(frame["time"]))
    test, train = shuffled["time"][1800:], shuffled["time"][:1620]
    newer = (train > test.median()).mean()
    said = " ".join(printed_of(tmp_path, shuffled, capsys).split())
    assert f"{newer:.0%} of the training rows are newer than half of the test rows" in said
    frame["label"] = [0] * 1900 + [1] * 100
    said = printed_of(tmp_path, frame[["label", "site"]], capsys)
    assert "the train part has no clicks, so it has no AUC" in said
    assert "the test part" not in said.partition("advice")[2]


def test_a_reader_that_has_enough(log, tmp_path):
    command = [sys.executable, "-m", "stampede.data.describe", str(log[0] / "log_0.csv")]
    command += ["--out", str(tmp_path / "out")]
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    os.close(writing)
    assert done.returncode == 141
    assert "Error" not in done.stderr and "Traceback" not in done.stderr, done.stderr
    assert (tmp_path / "out/description.txt").exists()
