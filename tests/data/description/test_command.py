"""`python -m stampede.data.describe` as a user sees it."""

import os
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest

from stampede.data.describe import WIDTH, main
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
    assert max(map(len, text.splitlines())) <= WIDTH
    (site,) = (line for line in text.splitlines() if line.startswith("site  ") and "ids" in line)
    (rates,) = (line for line in text.splitlines() if line.startswith("site  ") and " s1 " in line)
    frame = pd.concat(map(pd.read_csv, files))
    assert site.split()[2] == str(frame["site"].nunique())
    assert site.split()[3] == f"{frame['site'].isna().mean():.2%}"
    assert rates.split()[1] == frame["site"].value_counts().index[0]
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


@pytest.mark.parametrize(
    "options, sentence",
    [
        (["--set", "splt=random"], "did you mean 'split'?"),
        (["--kind", "avazu", "--schema", "x.yaml"], "--schema belongs to --kind table"),
        (["--kind", "table"], "a table needs a schema file"),
    ],
)
def test_mistakes_on_the_command_line(log, tmp_path, options, sentence, capsys):
    folder, _ = log
    command = [str(folder / "log_0.csv"), "--out", str(tmp_path / "out"), *options]
    assert main(command) == 2
    assert sentence in capsys.readouterr().err


def test_a_prepared_folder_and_an_output_that_is_a_file(log, tmp_path, capsys):
    folder = write_small(tmp_path / "prepared")
    assert main([str(folder), "--out", str(tmp_path / "out")]) == 2
    assert "is a prepared folder; describe the log's files" in capsys.readouterr().err
    assert main([str(tmp_path / "log_0.csv"), "--out", str(folder / "manifest.json")]) == 2
    assert "choose another folder" in capsys.readouterr().err


@pytest.mark.slow
def test_a_page_of_many_odd_columns(tmp_path, capsys):
    rows = 40
    frame = pd.DataFrame({"label": np.arange(rows) % 2})
    for i in range(55):
        frame[f"an_id_with_a_long_name_{i}"] = "x" if i else np.nan
        frame[f"number_{i}"] = [np.nan, -(10.0 ** (i % 30)), 0.5, 10.0 ** (i % 30)][i % 4]
    assert described_in(tmp_path, frame, capsys)
    assert (tmp_path / "out/description.png").stat().st_size > 10_000
    empty = frame[["label", "an_id_with_a_long_name_0", "number_0"]]
    assert described_in(tmp_path, empty, capsys)


def described_in(folder, frame, capsys, *options):
    """What is printed of a log, all of whose columns but the label are ids or numbers."""
    frame.to_csv(folder / "log.csv", index=False)
    numbers = [name for name in frame if name.startswith("number")]
    ids = [name for name in frame if name not in ("label", "time", *numbers)]
    timed = "time: {column: time}\n" * ("time" in frame)
    (folder / "schema.yaml").write_text(f"label: label\nids: {ids}\nnumbers: {numbers}\n{timed}")
    given = [str(folder / "log.csv"), "--schema", str(folder / "schema.yaml")]
    assert main([*given, "--out", str(folder / "out"), *options]) == 0
    said = capsys.readouterr().out
    assert max(map(len, (folder / "out/description.txt").read_text().splitlines())) <= WIDTH
    return said


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


def test_rows_and_click_rates_are_shown(tmp_path, capsys):
    rows = 1000
    frame = pd.DataFrame({"label": [0, 1, 0, 0] * 250, "site": ["a", "b", "a", "a"] * 250})
    frame["number"] = np.arange(rows) % 4
    frame["time"] = 1_600_000_000 // 86400 * 86400 + np.repeat([0, 1, 1, 4], 250) * 86400
    said = described_in(tmp_path, frame, capsys).splitlines()
    over = {line.split()[1]: line.split()[3:] for line in said if line.startswith("  from 2020")}
    assert over["2020-09-14"] == ["500", "50.00%", "125", "0.2500"], over
    (line,) = (line.split() for line in said if "75.0%" in line)
    assert line == ["site", "a", "75.0%", "0.000", "b", "25.0%", "1.000"]
    at = said.index(next(line for line in said if line.startswith("click rate by size")))
    assert said[at + 1].split() == ["number", "-", "0.5000", "0.0000", "-", "0.0000"]
    assert sum(line.split()[:1] == ["site"] and "1.0000" in line for line in said) == 1


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
