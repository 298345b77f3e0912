"""Guesses of what a log is."""

import gzip

import pandas as pd
import pytest

from stampede.data.describe import main
from stampede.data.description.guess import guess
from stampede.data.schema.schema import load_schema


def test_known_logs_are_known(tmp_path):
    rows = 3 * ("\t".join(["1", *["5"] * 13, *["68fd1e64"] * 26]) + "\n")
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
    assert "found no time" in found.reason[-1]
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


def test_the_features_that_auto_will_choose_are_said_with_their_keys(log, tmp_path):
    _, frame = log
    frame = frame.assign(rank=range(len(frame)), rate=0.5)
    frame.to_csv(tmp_path / "log.csv", index=False)
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
        ("label,b\n5,x\n1,y\n", "found 5.0; write 0 or 1, or `label: {column, at_least}` in the"),
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
