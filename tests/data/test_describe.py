"""`stampede describe`: guesses, statistics against pandas, and what is printed."""

import bz2
import gzip
import io
import json
import lzma
import os
import re
import shlex
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pandas as pd
import polars as pl
import pyarrow
import pytest
from sklearn.metrics import roc_auc_score

from stampede.data.describe import described_column, main, parts_of, read_rows
from stampede.data.errors import DataError
from stampede.data.guess import guess
from stampede.data.leaks import alone, counts_by_value, error_of_auc
from stampede.data.options import PreparationOptions
from stampede.data.raw.log import RawLog
from stampede.data.raw.rows import BadRows
from stampede.data.schema.schema import Schema, load_schema
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
    """The rows of the log in a folder, and the part of each row."""
    log, schema = str(folder / "log_*.csv"), str(folder / "schema.yaml")
    options = PreparationOptions(features="paper", **split)
    source = open_source("table", log, options, schema=schema)
    (folder / "spool").mkdir()
    rows, _ = read_rows(source, BadRows("error"), limit, folder / "spool")
    return rows, rows.select("#part").collect()["#part"].to_numpy()


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
    rows, parts = described(folder, split=split)
    if split == "sequential":
        # The last tenth is for the test, the last tenth of the rest for validation.
        assert parts.tolist() == np.repeat([0, 1, 2], [2430, 270, 300]).tolist()
    counts = np.bincount(parts, minlength=3), np.bincount(parts, frame["clicked"], 3)
    assert parts_of(rows) == list(zip(*counts, strict=True))
    columns = [described_column(rows, name, "ids") for name in ("site", "user", "tags")]
    for column in columns:
        values = values_of(frame, column.name)
        counts = values.value_counts()
        assert (column.values, column.distinct) == (len(values), len(counts))
        assert column.missing == pytest.approx(values.isna().mean())
        clicks = frame["clicked"].loc[values.index].groupby(values.to_numpy()).sum()
        top, count, clicked = column.common
        assert counts[top] == count == counts.max() and clicks[top] == clicked
        known = set(values_of(frame[parts == 0], column.name).dropna())
        within = values_of(frame[parts == 2], column.name)
        assert column.unseen == pytest.approx((~within.isin(known) & within.notna()).mean())
        assert column.alone == pytest.approx(auc_by_hand(frame, parts, column.name))
    assert any(column.unseen for column in columns)
    price = described_column(rows, "price", "number")
    # Numbers are read as float32.
    prices = frame["price"].astype("float32").astype("float64")
    present = prices.dropna()
    expected = [present.min(), present.median(), present.max()]
    np.testing.assert_allclose(price.common, expected, rtol=1e-12)
    assert (price.distinct, price.unseen) == (present.nunique(), None)
    assert price.missing == pytest.approx(frame["price"].isna().mean())
    # Buckets of about fifty rows in training, and one of missing prices.
    train = prices[parts == 0].dropna()
    edges = np.unique(np.quantile(train, np.arange(1, 50) / 50, method="nearest"))
    buckets = pd.Series(np.searchsorted(edges, prices)).map("b{}".format).mask(prices.isna())
    as_ids = frame.assign(price=buckets)
    assert price.alone == pytest.approx(auc_by_hand(as_ids, parts, "price"))


@pytest.mark.parametrize("limit", [1, 1700])
def test_the_first_rows(log, limit):
    folder, frame = log
    rows, parts = described(folder, limit)
    counts = np.sum(parts_of(rows), 0).tolist()
    assert counts == [limit, frame["clicked"][:limit].sum()]
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
    assert "time: 'seen', as seconds since 1970" in found.reason
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
    assert found == guess([(folder / "log.parquet").rename(folder / "LOG.PARQUET")])
    assert found.schema["time"] == {"column": "timestamp"}
    assert found.schema["ids"]["tags"] == {"separator": "|"}


def test_a_label_of_another_name(tmp_path, capsys):
    """The only column with two values, or the one that is given."""
    path, out = tmp_path / "log.csv", tmp_path / "out"
    frame = pd.DataFrame({"user": range(100), "bought": np.arange(100) % 2, "price": 0.5})
    frame.to_csv(path, index=False)
    given = [str(path), "--out", str(out)]
    assert main(given) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "label 'bought', the only column with two values; --label COLUMN names" in said
    assert load_schema(out / "schema.yaml").label[""].column == "bought"
    frame["answer"] = np.where(np.arange(100) % 3, "view", "buy")
    frame.to_csv(path, index=False)
    assert main(given) == 2
    error = capsys.readouterr().err
    assert "none is named label" in error and "bought, answer have two values" in error
    # Every column, and commands that work.
    for line in (
        "bought  2 values: 0, 1",
        "answer  2 values: buy, view",
        "user    100 values: 0, 1, 2",
        "price   1 value: 0.5",
    ):
        assert f"  {line}\n" in error
    assert f"  stampede describe {path} --label bought\n" in error
    command = f"  stampede describe {path} --label answer\n"
    assert command in error
    assert main([*shlex.split(command)[2:], "--out", str(out)]) == 0
    schema = load_schema(out / "schema.yaml")
    # The rarer value.
    assert (schema.label[""].column, schema.label[""].positive) == ("answer", ["buy"])
    assert set(schema.ids) == {"user", "bought"} and set(schema.numbers) == {"price"}
    assert main([*given, "--label", "click"]) == 2
    assert "--label 'click': no such column; write one of 'user', " in capsys.readouterr().err


@pytest.mark.parametrize(
    "content, sentence",
    [
        ("label,b\n", "has only a header line"),
        ("label,b\n,x\n1,y\n", "column label: found nothing; write 0 or 1"),
        ("label,b\n1," + "x\0y\n", "line 2: found a NUL byte"),
        ("a" * 2_000_000 + ",b\n1,2\n", "column is the label: none is named label"),
        ("1,2\n3,4\n", "no column has two values; write"),
        ("1,2\n0,4\n1,5\n", "if line 1 is a row and not a header, with `columns: [label, "),
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


def test_files_of_other_formats_are_named(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    frame, path = pl.DataFrame({"label": [0, 1], "user": ["a", "b"]}), Path("log.csv")
    csv, schema = frame.write_csv().encode(), Schema(label="label", ids=["user"])
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as file:
        file.writestr("log.csv", csv)
    for content, sentence in (
        (frame.write_parquet, "is Parquet; add .parquet to its name, or"),
        (frame.write_ipc, 'is Arrow (Feather); convert it to Parquet: `pl.read_ipc("'),
        (frame.write_avro, 'is Avro; convert it to Parquet: `pl.read_avro("'),
        (frame.write_ndjson, 'is JSON; convert it to Parquet: `pl.read_ndjson("'),
        (frame.write_json, 'is JSON; convert it to Parquet: `pl.read_json("'),
        (gzip.compress(csv), "is compressed by gzip; add .gz to its name"),
        (pyarrow.compress(csv, "zstd", asbytes=True), "by Zstandard; add .zst to its name"),
        (bz2.compress(csv), "compressed by bzip2; unpack it, or compress it by gzip"),
        (lzma.compress(csv), "compressed by xz; unpack it, or compress it by gzip"),
        (packed.getvalue(), "a zip archive; unpack it"),
    ):
        path.write_bytes(content) if isinstance(content, bytes) else content(path)
        assert main([str(path)]) == 2
        error = capsys.readouterr().err
        assert sentence in error and len(error.splitlines()) == 1, error
        # Training says the same.
        with pytest.raises(DataError, match=f"^{re.escape(error[len('error: ') :].rstrip())}$"):
            next(RawLog(schema, [path]).chunks(BadRows("error")))
        if "pl." in sentence:
            exec(re.search("`(.*)`", error)[1], {"pl": pl})
            assert pl.read_parquet("log.parquet").equals(frame)
    path.write_text("[label],[user]\n0,a\n1,b\n")
    assert main([str(path), "--label", "[label]"]) == 0


def test_the_command_writes_a_table_and_a_schema(log, tmp_path, capsys):
    folder, frame = log
    out = tmp_path / "out"
    files = [str(folder / f"log_{i}.csv") for i in range(3)]
    assert main([*files, "--out", str(out)]) == 0
    text = (out / "description.txt").read_text()
    assert text in capsys.readouterr().out
    (site,) = (line for line in text.splitlines() if line.startswith("site  "))
    top = frame["site"].value_counts().index[0]
    clicked = frame["clicked"][frame["site"] == top].mean()
    assert site.split()[1:4] == [
        "ids", f"{frame['site'].isna().mean():.2%}", str(frame["site"].nunique())
    ]  # fmt: skip
    assert site.split()[6] == top and site.split()[9] == f"{clicked:.3f}"
    # The guessed schema can be given.
    assert list(load_schema(out / "schema.yaml").ids) == ["site", "user", "tags"]
    assert main([*files, "--out", str(out), "--schema", str(folder / "schema.yaml")]) == 0
    text = (out / "description.txt").read_text()
    for words in ("times: 2020-09-13 12:", "hash 7"):
        assert words in text


def test_a_corrected_schema_is_not_replaced(log, tmp_path, capsys):
    out = tmp_path / "out"
    command = [str(log[0] / "log_0.csv"), "--out", str(out)]
    assert main([*command, "--label", "user"]) == 0
    # Nobody has changed it.
    assert main(command) == 0
    schema = out / "schema.yaml"
    schema.write_text(corrected := schema.read_text().replace("  tags:", "  # tags:"))
    before = {file: file.read_bytes() for file in out.iterdir()}
    capsys.readouterr()
    assert main([*command, "--label", "user"]) == 2
    error = capsys.readouterr().err
    assert f"{schema}: is not what describe wrote" in error and f"write --schema {schema} " in error
    assert before == {file: file.read_bytes() for file in out.iterdir()}
    assert main([*command, "--schema", str(schema)]) == 0
    assert schema.read_text() == corrected
    schema.unlink()
    assert main(command) == 0


@pytest.mark.parametrize("rows, empty", [(1, "train and validation"), (11, "validation"), (12, "")])
def test_a_log_too_short_to_train_on(tmp_path, capsys, rows, empty):
    path = tmp_path / "log.csv"
    path.write_text("label,user\n" + "".join(f"{row % 2},u{row}\n" for row in range(rows)))
    assert main([str(path), "--out", str(tmp_path / "out")]) == 0
    said = " ".join(capsys.readouterr().out.partition("\nto train\n")[2].split())
    assert ("launch.py" in said) == (not empty)
    assert (f"no rows for {empty}, so" in said) == bool(empty)


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


@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_numbers_that_mean_a_missing_value(tmp_path, capsys, form):
    path, out = tmp_path / f"log.{form}", tmp_path / "out"
    frame = pl.DataFrame({"label": [0, 1] * 20, "user": range(40), "age": [-1, 20, 30, 40] * 10})
    frame = frame.with_columns(price=pl.when(pl.col("user") < 8).then(-999.0).otherwise(0.5))
    frame.write_csv(path) if form == "csv" else frame.write_parquet(path)
    (tmp_path / "schema.yaml").write_text(
        'label: label\nids: [user]\nnumbers: [age, price]\nmissing: ["", "-1", "-999"]\n'
    )
    given = ["--schema", str(tmp_path / "schema.yaml"), "--out", str(out)]
    assert main([str(path), *given]) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line}
    assert " 25.00% " in lines["age"] and lines["age"].endswith("  20 .. 30 .. 40")
    assert " 20.00% " in lines["price"] and lines["price"].endswith("  0.5 .. 0.5 .. 0.5")


def test_mistakes_on_the_command_line(log, tmp_path, capsys):
    folder = write_small(tmp_path / "prepared")
    path, out = log[0] / "log_0.csv", tmp_path / "out"
    for given, to, options, sentence in (
        (path, out, ["--kind", "avazu", "--schema", "x.yaml"], "--schema belongs to --kind table"),
        (path, out, ["--kind", "table"], "a table needs a schema file"),
        (path, out, ["--schema", "x.yaml", "--label", "a"], "--label belongs to a guessed schema"),
        (path, folder / "manifest.json", [], "choose another folder"),
        (folder, out, [], "is a prepared folder; write the files of the log"),
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
        "user": draw.integers(0, 3600, rows),
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
        "or keep a part that recurs, such as the hour of a time",
        "this share of the test ids is not in the training part; their rows are scored by the",
        "landing_page 1.000 (+- 0.005), number_of_seconds 1.000 (+- 0.005): this test AUC alone "
        "suggests that",
        "nothing, number_of_nothing: missing in all rows; leave it out",
        "country, number_one: the same in all rows; leave it out",
    ):
        assert words in said, said
    assert "site" not in said and "number_good" not in said
    frame["label"] = [0] * 1900 + [1] * 100
    said = printed_of(tmp_path, frame[["label", "site"]], capsys)
    assert "the train part has no clicks, so it has no AUC" in said
    assert "the test part" not in said.partition("\nadvice\n")[2]


@pytest.mark.parametrize("share, click_rate, said", [
    (1.0, 0.5, True), (1.0, 0.004, False), (0.75, 0.5, True), (0.55, 0.5, False),
])  # fmt: skip
def test_a_leak_is_told_where_enough_clicks_prove_it(tmp_path, capsys, share, click_rate, said):
    """A column that knows a share of the labels, beside one that knows nothing."""
    draw, rows = np.random.default_rng(1), 4000
    label = (draw.random(rows) < click_rate).astype(int)
    told = np.where(draw.random(rows) < share, label, draw.integers(0, 2, rows))
    frame = pd.DataFrame({"label": label, "told": told, "site": draw.integers(0, 9, rows)})
    printed = printed_of(tmp_path, frame.astype({"told": str}), capsys)
    assert ("known only after the click" in printed) == said


@pytest.mark.parametrize("clicks, share, told", [
    (700, 0.1, True), (40, 1.0, False), (3700, 0.05, False),
    # One row in 400 that is no click.
    (1200, 0.9, True),
])  # fmt: skip
def test_values_that_only_clicks_have_are_told(tmp_path, capsys, clicks, share, told):
    """Where few clicks have them, their AUC alone is low. Of 40 clicks, or of 92%, they tell less.

    A value is missing in the other rows, or 0.
    """
    draw, label = np.random.default_rng(1), np.zeros(4000, int)
    label[draw.permutation(4000)[:clicks]] = 1
    after = label.astype(bool) & (draw.random(4000) < share)
    clicked = after.sum()
    after[np.flatnonzero(label == 0)[: int(clicks == 1200)]] = True
    frame = pd.DataFrame({
        "label": label,
        "site": draw.integers(0, 9, 4000),
        "number_of_seconds": np.where(after, draw.random(4000), np.nan),
        "number_bought": np.where(after, draw.integers(1, 5, 4000), 0),
    })  # fmt: skip
    printed = " ".join(printed_of(tmp_path, frame, capsys).split())
    rows = f"({clicked:,} of {after.sum():,})"
    said = f"number_of_seconds {rows}, number_bought {rows}: rows with another value than the most"
    assert (f"{said} frequent one are clicks" in printed) == told and "site (" not in printed


def test_rows_without_a_label_say_nothing_of_a_leak():
    """A value that all rows with a label have, and no others; 9 of 10 of them are clicks."""
    draw = np.random.default_rng(0)
    known = draw.random(4000) < 0.3
    label = np.where(known, draw.random(4000) < 0.9, np.nan)
    frame = pl.DataFrame({"value": known, "part": draw.integers(0, 3, 4000), "label": label})
    frame = frame.with_columns(pl.col("label").fill_nan(None))
    found = alone(counts_by_value(frame.lazy(), "value", "part", "label"))
    assert found.auc == 0.5 and found.others == 0
    clicks = frame.with_columns(label=pl.col("value").cast(pl.Float32))
    found = alone(counts_by_value(clicks.lazy(), "value", "part", "label"))
    assert found.auc == 1.0 and found.others == found.clicked == known.sum()


def test_the_error_of_an_auc_is_that_of_drawing_the_rows_again():
    draw = np.random.default_rng(2)
    aucs = []
    for _ in range(2000):
        clicked, others = draw.exponential(1, 60), draw.exponential(0.2, 400)
        aucs.append((clicked[:, None] > others).mean())
    # For scores drawn from two exponentials the formula is exact.
    assert error_of_auc(np.mean(aucs), 60, 400) == pytest.approx(np.std(aucs), rel=0.06)
    assert error_of_auc(1.0, 20, 1000) > 0.01


@pytest.mark.wide
def test_a_reader_that_has_enough(log, tmp_path):
    command = [sys.executable, "-m", "stampede", "describe", str(log[0] / "log_0.csv")]
    command += ["--out", str(tmp_path / "out")]
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    os.close(writing)
    assert done.returncode == 141
    assert "Error" not in done.stderr and "Traceback" not in done.stderr, done.stderr
    assert (tmp_path / "out/description.txt").exists()


def test_histories_are_guessed_to_hold_the_ids_of_another_column(tmp_path):
    draw = np.random.default_rng(0)
    seen = [[f"i{one}" for one in draw.integers(0, 40, n)] for n in draw.integers(0, 80, 300)]
    frame = pl.DataFrame({
        "clicked": draw.integers(0, 2, 300),
        "user": [f"u{one}" for one in draw.integers(0, 50, 300)],
        "item": [f"i{one}" for one in draw.integers(0, 40, 300)],
        "seen": ["^".join(cell) for cell in seen],
        "cart": [json.dumps(cell[:3]) for cell in seen],
        "words": ["|".join(f"w{one}" for one in draw.integers(0, 9, 2)) for _ in seen],
    })  # fmt: skip
    expected = {
        "user": {},
        "item": {},
        "seen": {"separator": "^", "share": "item", "max_ids": 50, "keep": "last"},
        "cart": {"separator": "json", "share": "item"},
        "words": {"separator": "|"},
    }
    frame.write_csv(tmp_path / "log.csv")
    found = guess([tmp_path / "log.csv"])
    assert found.schema["ids"] == expected
    assert any("seen has ids of item, so it uses that table" in said for said in found.reason)
    assert Schema.model_validate(found.schema).ids["cart"].share == "item"
    frame.with_columns(seen=pl.Series(seen)).write_parquet(tmp_path / "log.parquet")
    expected["seen"]["separator"] = "|"
    assert guess([tmp_path / "log.parquet"]).schema["ids"] == expected
    pairs = pl.Series([[f"i{one}", f"i{one + 1}"] for one in range(300)], dtype=pl.Array(str, 2))
    frame.select("clicked", "user", pairs=pairs).write_parquet(tmp_path / "pairs.parquet")
    assert "separator" in guess([tmp_path / "pairs.parquet"]).schema["ids"]["pairs"]


def test_columns_share_the_table_of_the_one_that_has_their_ids(tmp_path):
    """Also where all have one id, or all have several; whole numbers look alike by chance."""
    draw = np.random.default_rng(0)
    viewed = [[f"v{one}" for one in draw.integers(0, 60, n)] for n in draw.integers(0, 80, 300)]
    frame = pl.DataFrame({
        "clicked": draw.integers(0, 2, 300),
        "last_item": [f"i{one}" for one in draw.integers(0, 40, 300)],
        "version": [f"i{one}" for one in draw.integers(0, 40, 300)],
        "item": [f"i{one}" for one in draw.integers(0, 50, 300)],
        "from": [f"t{one}" for one in draw.integers(0, 8, 300)],
        "to": [f"t{one}" for one in draw.integers(0, 8, 300)],
        "user_id": draw.integers(1, 90, 300),
        "shop_id": draw.integers(1, 40, 300),
        "viewed": ["|".join(cell) for cell in viewed],
        "scores": ["|".join("0.5" for _ in cell) for cell in viewed],
        "prices": ["|".join("0.5" for _ in cell[1:]) for cell in viewed],
        "bought": ["|".join(cell[:4]) for cell in viewed],
        "shops": [json.dumps([int(one) for one in draw.integers(1, 40, 3)]) for _ in viewed],
    })  # fmt: skip
    frame.write_csv(tmp_path / "log.csv")
    found = guess([tmp_path / "log.csv"])
    assert found.schema["ids"] == {
        "last_item": {"share": "item"},
        "version": {},
        "item": {},
        "from": {},
        "to": {},
        "user_id": {},
        "shop_id": {},
        "viewed": {"separator": "|", "max_ids": 50, "keep": "last", "weights": "scores"},
        "bought": {"separator": "|", "share": "viewed"},
        "shops": {"separator": "json", "share": "shop_id"},
    }
    said = " ".join(found.reason)
    assert "last_item has ids of item, so it uses that table" in said
    longest = max(map(len, viewed))
    assert f"viewed has up to {longest} ids in a cell, of which the last 50 are kept" in said
    assert "scores has a number for each id of viewed, so it is its weights" in said
    assert "'prices (lists of fractions; `weights` of ids?)'" in said
    Schema.model_validate(found.schema)
