"""`python -m stampede.data.describe` as a user sees it."""

import numpy as np
import pandas as pd
import pytest

from stampede.data.describe import main
from stampede.data.description.collector import collect
from stampede.data.description.picture import draw
from stampede.data.description.table import WIDTH
from stampede.data.schema import load_schema
from support.described import prepared, raw_input


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
