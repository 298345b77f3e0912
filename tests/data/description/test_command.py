"""`python -m stampede.data.describe` as a user sees it."""

import os
import subprocess
import sys

import numpy as np
import pandas as pd

from stampede.data.describe import main
from stampede.data.schema.schema import load_schema
from support.paths import ROOT
from support.prepared import write_small


def test_the_command_writes_a_table_and_a_page(log, tmp_path, capsys):
    folder, _ = log
    out = tmp_path / "out"
    files = [str(folder / f"log_{i}.csv") for i in range(3)]
    assert main([*files, "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    text = (out / "description.txt").read_text()
    assert text in printed
    (site,) = (line for line in text.splitlines() if line.startswith("site  ") and "ids" in line)
    (rates,) = (line for line in text.splitlines() if line.startswith("site  ") and " s1 " in line)
    frame = pd.concat(map(pd.read_csv, files))
    assert site.split()[2] == str(frame["site"].nunique())
    assert site.split()[3] == f"{frame['site'].isna().mean():.2%}"
    top = frame["site"].value_counts().index[0]
    clicked = frame["clicked"][frame["site"] == top].mean()
    assert rates.split()[1] == top and rates.split()[3] == f"{clicked:.3f}"
    assert (out / "description.png").read_bytes().startswith(b"\x89PNG")
    # The guessed schema can be given.
    assert list(load_schema(out / "schema.yaml").ids) == ["site", "user", "tags", "seen"]
    assert main([*files, "--out", str(out), "--schema", str(folder / "schema.yaml")]) == 0
    text = (out / "description.txt").read_text()
    assert "over time (UTC)" in text and "from 2020-09-13 12:00" in text
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
    # Rows after the first thousand, all of them in the file before, are not read.
    assert main([*command, "--rows", "1000"]) == 0
    assert main([*command, "--on-bad-row", "skip"]) == 0
    text = (tmp_path / "out" / "description.txt").read_text()
    assert "left out 1 bad row, listed" in text
    assert "2,999" in text
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


def described_in(folder, frame, capsys):
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
    said = " ".join(described_in(tmp_path, frame, capsys).partition("\nadvice\n")[2].split())
    for words in (
        "% of the rows lie in 1 day of 5, from 2020-09-15 00:00 on: a split by rows",
        "hour 100%, request 100%: this share of the test ids is not in the training part; leave it",
        "for a time, use hour_of_day and weekday, as data.features=auto does",
        "min_count=2 or more trains the row that they share",
        "landing_page 1.000, number_of_seconds 1.000: this test AUC alone suggests that",
        "nothing, number_of_nothing: missing in all rows; leave it out",
        "country, number_one: the same in all rows; leave it out",
    ):
        assert words in said, said
    assert "site" not in said and "number_good" not in said
    frame["label"] = [0] * 1900 + [1] * 100
    said = described_in(tmp_path, frame[["label", "site"]], capsys)
    assert "the train part has no clicks, so it has no AUC" in said
    assert "the test part" not in said.partition("advice")[2]


def test_a_reader_that_has_enough(log, tmp_path):
    command = [sys.executable, "-m", "stampede.data.describe", str(log[0] / "log_0.csv")]
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [*command, "--out", str(tmp_path / "out")], stdout=writing, stderr=subprocess.PIPE,
        text=True, cwd=ROOT,
    )  # fmt: skip
    os.close(writing)
    assert done.returncode == 141
    assert "Error" not in done.stderr and "Traceback" not in done.stderr, done.stderr
    assert (tmp_path / "out/description.txt").exists()
