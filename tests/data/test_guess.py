"""What `stampede describe` makes of columns: ids or numbers, the label, the split, the times."""

import numpy as np
import polars as pl
import pyarrow
import pyarrow.parquet
import pytest

from stampede.data import DataError
from stampede.data.describe import main
from stampede.data.guess import guess
from stampede.data.guess_columns import number_or_ids
from stampede.data.schema.schema import load_schema
from stampede.settings import SettingsError
from support.paths import shared

ROWS = 3000


def draw(seed=0):
    return np.random.default_rng(seed)


@pytest.mark.parametrize(
    "name, values, is_number",
    [
        ("x", draw().lognormal(4, 1, ROWS).astype(int), True),
        ("stock", draw().poisson(200, ROWS), True),
        ("x", draw().exponential(3000, ROWS).astype(int), True),
        ("x", draw().integers(-40, 40, ROWS), True),
        ("unitPrice", draw().integers(1, 90, ROWS), True),
        ("x", draw().random(ROWS), True),
        # One after the other, at random, in two ranges; few; pandas writes 45.0 for 45.
        ("x", draw().integers(1, 900, ROWS), False),
        ("x", draw().integers(1, 10**6, ROWS), False),
        ("x", draw().integers(0, 300, ROWS) + 10**6 * draw(1).integers(0, 2, ROWS), False),
        ("price", draw().integers(0, 5, ROWS), False),
        ("x", np.where(draw().random(ROWS) < 0.1, np.nan, draw().integers(1, 900, ROWS)), False),
        # Popular ids have small numbers here, but their name says that they are ids.
        ("userId", draw().zipf(1.3, ROWS) % 100_000, False),
        ("item", draw().zipf(1.3, ROWS) % 100_000, False),
        # A number would lose their last digits.
        ("x", draw().lognormal(20, 2, ROWS).astype(int), False),
        ("x", ["a", "b", "c"], False),
        ("x", [True, False], False),
    ],
)
def test_a_number_or_ids(name, values, is_number):
    assert number_or_ids(pl.Series(name, values))[0] == is_number


def test_counts_of_real_logs_are_numbers_and_ids_are_ids():
    """Without the columns' names: Criteo's counts are numbers, all of MovieLens' ids are ids."""
    criteo = shared("data/criteo_kaggle_137k.tsv.gz")
    frame = pl.read_csv(
        criteo, separator="\t", has_header=False, n_rows=10_000, infer_schema_length=10_000
    )
    counts = [f"column_{at + 1}" for at in (1, 2, 3, 5, 6, 7, 9, 12, 13)]
    assert all(number_or_ids(frame[name].alias("x"))[0] for name in counts)
    ids = {
        "movielens_100k": ["user_id", "movie_id"],
        "flights_2013": ["flight", "sched_arr_time"],
        "avazu_20k": ["C14", "C17", "C20", "C21"],
    }
    for log, names in ids.items():
        path = shared(f"data/{log}.csv.gz")
        frame = pl.read_csv(path, n_rows=10_000, infer_schema_length=10_000)
        assert not any(number_or_ids(frame[name].alias("x"))[0] for name in names)


def written(tmp_path, **columns):
    path = tmp_path / "log.csv"
    rows = max(len(values) for values in columns.values())
    ids = draw().integers(0, 50, rows)
    pl.DataFrame({"user": ids, **columns}).write_csv(path)
    return path


@pytest.mark.parametrize(
    "name, values, keys",
    [
        ("part", ["train"] * 900 + ["test"] * 100, {"test_values": ["test"]}),
        (
            "Split",
            ["TRAIN"] * 800 + ["valid"] * 100 + ["holdout"] * 100,
            {"test_values": ["holdout"], "validation_values": ["valid"]},
        ),
        ("fold", [*range(5)] * 200, {"test_values": ["4"]}),
        ("fold", [*range(40)] * 25, {}),
        ("part", ["wheel", "door", "seat", "lamp"] * 250, {}),
        ("part", ["a"] * 1000, {}),
        ("party", ["train", "test"] * 500, {}),
    ],
)
def test_a_column_of_parts_is_the_split(tmp_path, monkeypatch, capsys, name, values, keys):
    # Its first bytes hold one part only.
    monkeypatch.setattr("stampede.data.guess._HEAD_BYTES", 1000)
    labels = draw().integers(0, 2, len(values))
    path = written(tmp_path, click=labels, **{name: values})
    found = guess([path])
    expected = {"split": "by_column", "split_column": name, **keys} if keys else {}
    assert found.split == expected
    assert (name in found.schema["ids"]) == (not keys)
    out = tmp_path / "out"
    assert main([str(path), "--out", str(out)]) == 0
    text = capsys.readouterr().out
    if keys:
        tested = sum(str(one) in keys["test_values"] for one in values)
        assert f"test {tested:,} " in " ".join(text.split())
        assert f"data.split_column={name}" in text.partition("to train")[2]
    # A split that is given is kept.
    assert main([str(path), "--out", str(out), "-s", "split=random"]) == 0
    assert "data.split=random" in capsys.readouterr().out.partition("to train")[2]


def test_what_is_no_label(tmp_path):
    """A person's sex beside another column with two values; a rating if there is none."""
    sex, rating = ["f", "m", "m"] * 100, draw().integers(1, 6, 300)
    assert guess([written(tmp_path, sex=sex, answer=["n", "y", "n"] * 100)]).schema["label"] == (
        "answer"
    )
    found = guess([written(tmp_path, gender=sex, stars=rating)])
    assert found.schema["label"] == {"column": "stars", "at_least": 4}
    with pytest.raises(DataError, match="a, b have two values"):
        guess([written(tmp_path, a=sex, b=sex, rating=rating)])


def test_the_schema_says_why_beside_each_column(tmp_path):
    path = written(
        tmp_path, click=[0, 1] * 400, stock=draw().poisson(90, 800), city=["x", "y"] * 400
    )
    text = guess([path]).schema_text()
    for line in (
        "label: click  # named like a label",
        "  user: {}  # whole numbers",
        "  city: {}  # texts",
        "  stock: {}  # whole numbers named like an amount",
    ):
        assert f"{line}\n" in text
    (tmp_path / "schema.yaml").write_text(text)
    assert list(load_schema(tmp_path / "schema.yaml").numbers) == ["stock"]


@pytest.mark.parametrize(
    "line, said",
    [
        ("split: by_column", r"split: is a key of the configuration.*write data\.split=VALUE"),
        ("test_values: [a]", r"write data\.test_values=VALUE .*--set test_values=VALUE"),
        ("colums: [a]", "colums: unknown key; did you mean 'columns'"),
    ],
)
def test_a_key_of_the_configuration_in_a_schema_is_told_where_it_belongs(tmp_path, line, said):
    path = tmp_path / "schema.yaml"
    path.write_text(f"label: y\nids: [user]\n{line}\n")
    with pytest.raises(SettingsError, match=said):
        load_schema(path)


def test_structs_and_maps(tmp_path):
    orders = [[{"item": f"i{row % 3}", "price": 0.5}] for row in range(40)]
    scores = pyarrow.array(
        [[(f"t{row % 5}", 1.5)] for row in range(40)],
        pyarrow.map_(pyarrow.string(), pyarrow.float32()),
    )
    device = [{"os": "ab"[row % 2], "at": {"city": "xyz"[row % 3]}} for row in range(40)]
    clicked = [row % 4 == 0 for row in range(40)]
    table = {"clicked": clicked, "device": device, "orders": orders, "scores": scores}
    pyarrow.parquet.write_table(pyarrow.table(table), tmp_path / "log.parquet")
    found = guess([tmp_path / "log.parquet"])
    assert found.schema["ids"] == {
        "device_os": {"column": "device.os"},
        "device_at_city": {"column": "device.at.city"},
        "orders_item": {"column": "orders.item", "separator": "|"},
        "scores_key": {"column": "scores.key", "separator": "|"},
    }
    assert "orders.price (lists of fractions; `weights` of ids?)" in " ".join(found.reason)


def test_what_training_cannot_read_is_left_out(tmp_path):
    rows, item = range(40), pl.Series([f"i{row % 7}" for row in range(40)])
    clicked, bytes_ = [row % 4 == 0 for row in rows], [bytes([250, row]) for row in rows]
    frame = pl.DataFrame({
        "click": clicked, "item": item, "hist": [["i1", "i2"]] * 40, "uuid": bytes_,
        "images": [[one] for one in bytes_], "pairs": [[[row, 1]] for row in rows],
        "wait": pl.Series(rows).cast(pl.Duration), "kind": item.cast(pl.Categorical),
    })  # fmt: skip
    frame.write_parquet(tmp_path / "log.parquet")
    found = guess([tmp_path / "log.parquet"])
    assert set(found.schema["ids"]) == {"item", "hist", "kind"} and not found.schema["numbers"]
    said = " ".join(found.reason)
    for words in (
        "uuid (bytes)", "images (lists of bytes)", "pairs (lists of lists)", "wait (durations)"
    ):  # fmt: skip
        assert words in said
    frame.select(click=pl.col("uuid"), item=item).write_parquet(tmp_path / "log.parquet")
    with pytest.raises(DataError, match=r"log\.parquet: column click is stored as Binary"):
        guess([tmp_path / "log.parquet"])


def test_a_label_of_categories(tmp_path):
    """Is that of the same texts."""
    labels = pl.Series(["view", "view", "buy", "view"] * 10)
    found = []
    for kind in (pl.String, pl.Categorical, pl.Enum(["buy", "view"])):
        frame = pl.DataFrame({"label": labels.cast(kind), "item": [f"i{row}" for row in range(40)]})
        frame.write_parquet(tmp_path / "log.parquet")
        found.append(guess([tmp_path / "log.parquet"]).schema)
        assert main([str(tmp_path / "log.parquet"), "--out", str(tmp_path / "out")]) == 0
    assert found[0]["label"] == {"column": "label", "positive": ["buy"]}
    assert found[1] == found[2] == found[0]


def test_large_whole_numbers_are_counted_exactly():
    ids = pl.Series("x", range(2**63, 2**63 + 50), pl.UInt64)
    assert number_or_ids(ids) == (False, "whole numbers")


def test_objects_in_texts(tmp_path):
    lines = [
        f'{int(row % 4 == 0)};i{row % 7};{{"t{row % 5}": 1.5, "t{row % 3}": 2}}'
        for row in range(40)
    ]
    (tmp_path / "log.csv").write_text("\n".join(["clicked;item;scores", *lines]) + "\n")
    found = guess([tmp_path / "log.csv"])
    assert found.schema["ids"]["scores_key"] == {"column": "scores.key", "separator": "json"}
    assert "scores.value" in " ".join(found.reason)
