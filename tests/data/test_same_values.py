"""The same value as text and in every physical type is the same bin, number, id, label and part."""

import decimal

import numpy as np
import pandas as pd
import polars as pl
import pyarrow
import pyarrow.parquet
import pytest
import yaml

from stampede.data import DataError
from stampede.data.formulas import marked
from stampede.data.learning.learned import load
from stampede.data.raw.log import RawLog
from stampede.data.raw.rows import BadRows
from stampede.data.schema.schema import Schema
from support.prepared_arrays import arrays_of, manifest_of, vocabulary_of
from support.preparing import prepared
from support.quantiles import edges_by_hand

ROWS = 600
SCHEMA = """
label: {column: y, at_least: 4.2}
ids: {user: {min_count: 1}, part: {encode: hash, buckets: 50}, slot: {encode: integer, size: 9}}
numbers: {price: {bins: 7, transform: [standard]}}
"""


def drawn():
    draw = np.random.default_rng(0)
    return pd.DataFrame(
        {
            "y": draw.choice([1.0, 3.9, 4.2, 5.0], ROWS),
            "user": draw.integers(1, 40, ROWS),
            "part": draw.integers(0, 30, ROWS),
            "slot": draw.integers(0, 9, ROWS),
            # Few prices, so that all are edges of bins; most are no float32 numbers.
            "price": draw.choice([9.99, 14.99, 19.9, 0.1, 7.3, 250.01, -3.33], ROWS),
        }
    )


def decimals(values, scale):
    exact = [decimal.Decimal(f"{value:.{scale}f}") for value in values]
    return pyarrow.array(exact, pyarrow.decimal128(12, scale))


def in_type(frame, number, whole):
    """Arrow columns: numbers of one type, whole numbers of another."""
    columns = {}
    for name in frame:
        kind = number if name in ("y", "price") else whole
        if kind == "dictionary":
            columns[name] = pyarrow.array(frame[name].map(str)).dictionary_encode()
        elif kind == "decimal":
            columns[name] = decimals(frame[name], 2)
        elif kind == "text":
            columns[name] = pyarrow.array(frame[name].map(str))
        else:
            columns[name] = pyarrow.array(frame[name]).cast(kind)
    return pyarrow.table(columns)


def arrays(tmp_path, files, schema=SCHEMA, **options):
    (tmp_path / "schema.yaml").write_text(schema)
    out = tmp_path / "out"
    options = {"split": "sequential", "test_fraction": 0.2, **options}
    prepared(out, "table", [*map(str, files)], schema=str(tmp_path / "schema.yaml"), **options)
    return {part: arrays_of(out, part)[0] for part in ("train", "validation", "test")}


def assert_same(found, expected):
    for part, of_part in expected.items():
        for name, array in of_part.items():
            assert found[part][name].tobytes() == array.tobytes(), (part, name)


TYPES = [
    ("float64", "int64"), ("float32", "int8"), ("decimal", "uint16"), ("text", "float64"),
    ("dictionary", "decimal"), ("float32", "float32"), ("float64", "dictionary"),
]  # fmt: skip


@pytest.fixture(scope="module")
def of_text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    drawn().to_csv(folder / "log.csv", index=False)
    return arrays(folder, [folder / "log.csv"])


def test_bins_and_numbers_are_those_of_float32(of_text):
    frame = drawn()
    price = frame["price"].to_numpy().astype(np.float32)
    train = price[: len(of_text["train"]["label"])]
    expected = np.searchsorted(edges_by_hand(train.tolist(), 7), price) + 1
    found = np.concatenate([of_text[part]["ids"][:, 3] for part in of_text])
    np.testing.assert_array_equal(found, expected)
    scaled = (price - train.mean(dtype=float)) / train.std(dtype=float)
    numbers = np.concatenate([of_text[part]["numbers"][:, 0] for part in of_text])
    np.testing.assert_allclose(numbers, scaled, rtol=1e-6)
    labels = np.concatenate([of_text[part]["label"] for part in of_text])
    np.testing.assert_array_equal(labels, frame["y"] > 4)


@pytest.mark.parametrize("number, whole", TYPES)
def test_every_type_gives_the_same_arrays(tmp_path, of_text, number, whole):
    pyarrow.parquet.write_table(
        in_type(drawn(), number, whole), tmp_path / "log.parquet", row_group_size=90
    )
    assert_same(arrays(tmp_path, [tmp_path / "log.parquet"]), of_text)


MARKED = f"{SCHEMA}missing: ['', '-3.33', '3', '0.0']"


@pytest.fixture(scope="module")
def of_marked_text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("marked")
    drawn().to_csv(folder / "log.csv", index=False)
    return arrays(folder, [folder / "log.csv"], MARKED)


@pytest.mark.parametrize("number, whole", TYPES)
def test_a_number_that_means_a_missing_value_does_in_every_type(
    tmp_path, of_marked_text, number, whole
):
    table = in_type(drawn(), number, whole)
    pyarrow.parquet.write_table(table, tmp_path / "log.parquet", row_group_size=90)
    assert_same(arrays(tmp_path, [tmp_path / "log.parquet"], MARKED), of_marked_text)


def test_a_number_that_means_a_missing_value(tmp_path, of_text, of_marked_text):
    frame = drawn()
    train = len(of_marked_text["train"]["label"])
    ids = of_marked_text["train"]["ids"]
    # Rows of missing values: the first, and of slots the last.
    np.testing.assert_array_equal(ids[:, 0] == 0, frame["user"][:train] == 3)
    np.testing.assert_array_equal(ids[:, 2] == 9, frame["slot"][:train].isin([0, 3]))
    np.testing.assert_array_equal(ids[:, 3] == 0, frame["price"][:train] == -3.33)
    # Labels are never missing because of a number.
    for part in of_text:
        np.testing.assert_array_equal(of_marked_text[part]["label"], of_text[part]["label"])


NAN, WIDE = float("nan"), 2**63 - 1


@pytest.mark.parametrize(
    "values, marks, expected",
    [
        (["-999.00", "2", "NA"], ["NA", "-999"], [True, False, True]),
        ([" -999", "1000", "7"], ["-999", "1e3"], [True, True, False]),
        ([2**53 + 1, 2**53, None], [str(2**53 + 1)], [True, False, None]),
        ([WIDE, 1], [str(WIDE)], [True, False]),
        ([1e39, float("inf"), NAN], ["inf"], [False, True, False]),
        ([1.5, NAN], ["NaN"], [False, True]),
        ([float(np.float32(9.99)), 7.0], ["9.99"], [True, False]),
        ([True, False], ["FALSE"], [False, True]),
        (["TRUE", "x"], ["true"], [True, False]),
        (["a"], [], None),
        ([1.5], ["NA", "1"], None),
        ([None], ["1"], None),
    ],
)
def test_values_that_mean_a_missing_one(values, marks, expected):
    found = marked(pl.Series("a", values, strict=False), marks, is_number=True)
    assert (None if found is None else found.to_list()) == expected


def test_labels_are_missing_because_of_texts_alone(tmp_path):
    rules = [
        Schema.model_validate({"label": "y", "ids": {"u": {}}, "missing": m}).rules
        for m in (["", "NA"], ["-1"], ["False"], ["1970-01-01"])
    ]
    assert rules == [3, 4, 4, 4]
    pl.DataFrame({"y": [True, False], "u": [0, 1]}).write_parquet(tmp_path / "log.parquet")
    pl.DataFrame({"y": ["b", "-1"], "u": [0, 1]}).write_csv(tmp_path / "log.csv")
    for form, label, bad in (("parquet", "y", 0), ("csv", {"column": "y", "positive": ["b"]}, 1)):
        section = {"label": label, "ids": {"u": {}}, "missing": ["-1", "0", "False"]}
        rows = BadRows("skip")
        log = RawLog(Schema.model_validate(section), [tmp_path / f"log.{form}"])
        (chunk,) = log.chunks(rows)
        assert chunk.frame["u"].null_count() == 1 and rows.count == bad


def test_a_log_prepared_when_numbers_were_never_missing_is_refused(tmp_path):
    drawn().to_csv(tmp_path / "log.csv", index=False)
    arrays(tmp_path, [tmp_path / "log.csv"], MARKED)
    (path,) = (tmp_path / "out").rglob("learned.json")
    text = path.read_text()
    assert text.count('"rules": 4,') == 1
    path.write_text(text.replace('"rules": 4,', '"rules": 3,'))
    with pytest.raises(DataError, match=r"an older version .* \(rules 3 instead of 4\)"):
        load(path.parent)


def test_pandas_made_floats_of_ids_with_a_missing_one(tmp_path, capfd):
    frame, rows = drawn(), ROWS // 2
    frame["user"] = frame["user"].astype("Int64").mask(frame.index == rows)
    frame.to_csv(tmp_path / "whole.csv", index=False)
    expected = arrays(tmp_path, [tmp_path / "whole.csv"])
    (tmp_path / "floats").mkdir()
    files = [tmp_path / "floats" / name for name in ("a.csv", "b.csv")]
    frame[:rows].to_csv(files[0], index=False)
    frame[rows:].assign(user=frame["user"].astype("float64")).to_csv(files[1], index=False)
    assert ",45.0," not in files[0].read_text()
    assert_same(arrays(tmp_path / "floats", files), expected)
    said = f"read {rows - 1:,} ids such as 45.0 as the whole number 45: user {rows - 1:,}"
    assert said in capfd.readouterr().out.replace("\n", " ")
    known = load(tmp_path / "floats/out/learned").fields
    assert next(entry.rows for entry in known if entry.name == "user") == 39 + 2


@pytest.mark.parametrize("kind", ["float64", "decimal"])
def test_lists_of_floats(tmp_path, kind):
    draw, rows = np.random.default_rng(0), 200
    tags = [draw.integers(0, 9, draw.integers(0, 4)).tolist() for _ in range(rows)]
    frame = pd.DataFrame({"y": np.arange(rows) % 2, "tags": ["|".join(map(str, t)) for t in tags]})
    frame.to_csv(tmp_path / "log.csv", index=False)
    schema = 'label: y\nids: {tags: {separator: "|", min_count: 1}}\n'
    (tmp_path / "schema.yaml").write_text(schema)
    inner = pyarrow.float64() if kind == "float64" else pyarrow.decimal128(9, 3)
    values = [[decimal.Decimal(v) if kind == "decimal" else float(v) for v in t] for t in tags]
    table = pyarrow.table({"y": frame["y"], "tags": pyarrow.array(values, pyarrow.list_(inner))})
    pyarrow.parquet.write_table(table, tmp_path / "log.parquet")
    found = []
    for name in ("log.csv", "log.parquet"):
        log = RawLog(Schema.model_validate(yaml.safe_load(schema)), [tmp_path / name])
        cells = next(log.chunks(BadRows("error"))).frame["tags"].to_list()
        found.append([cell or [] for cell in cells])
    assert found[0] == found[1] == [[*map(str, t)] for t in tags]


def test_ids_with_fractions_are_their_shortest_text_and_versions_stay(tmp_path):
    schema = Schema.model_validate({"label": "y", "ids": ["x"]})

    def texts(values):
        frame = pl.DataFrame({"y": [0] * len(values), "x": values})
        frame.write_parquet(tmp_path / "log.parquet")
        log = RawLog(schema, [tmp_path / "log.parquet"])
        return next(log.chunks(BadRows("error"))).frame["x"].to_list()

    assert texts(pl.Series([45.5, 45.0, None, -2.0, -0.0])) == ["45.5", "45", None, "-2", "0"]
    assert texts(pl.Series([45.1, 45.0], dtype=pl.Float32)) == ["45.1", "45"]
    exact = [decimal.Decimal(text) for text in ("45.50", "45.00", "0.00", "100.00")]
    assert texts(pl.Series(exact)) == ["45.5", "45", "0", "100"]
    kept = ["1.10", "v1.0", "00.0", "1.0.0", "a", "10", "1e5"]
    assert texts(pl.Series([*kept, "1.0", "20.00", "-3.0", "0.0"])) == [*kept, "1", "20", "-3", "0"]


@pytest.mark.parametrize("kind, most", [("float32", 2**24), ("float64", 2**53)])
def test_ids_that_a_float_cannot_tell_apart_are_refused(tmp_path, kind, most):
    for value, is_bad in ((most, False), (most * 2, True)):
        frame = pd.DataFrame({"y": [0, 1], "user": np.array([1, value], kind)})
        frame.to_parquet(tmp_path / "log.parquet")
        log = RawLog(
            Schema.model_validate({"label": "y", "ids": ["user"]}), [tmp_path / "log.parquet"]
        )
        if is_bad:
            with pytest.raises(DataError, match=rf"log.parquet: column user .*above {most:,}"):
                next(log.chunks(BadRows("error")))
        else:
            assert next(log.chunks(BadRows("error"))).frame["user"].to_list() == ["1", str(most)]


def test_ids_alike_are_told(tmp_path, capfd):
    users = ["12", " 12", "12 ", "caf\u00e9", "cafe\u0301", "x", " y"] * 30
    frame = pd.DataFrame({"y": [0, 1] * 105, "user": users})
    frame.to_csv(tmp_path / "log.csv", index=False)
    schema = "label: y\nids: {user: {min_count: 1}}\n"
    arrays(tmp_path, [tmp_path / "log.csv"], schema, split="random")
    said = " ".join(capfd.readouterr().out.split())
    train = arrays_of(tmp_path / "out", "train")[0]["ids"][:, 0]
    row_of = vocabulary_of(tmp_path / "out", "user")
    rows = np.isin(train, [row_of[" 12"], row_of["12 "]]).sum()
    assert f"2 ids of user, in {rows} rows, differ from another id only by blanks" in said
    assert "' 12' beside '12'" in said or "'12 ' beside '12'" in said
    assert "1 id of user, in " in said and "only in how accents are encoded" in said
    assert len(row_of) == 7 and "' y'" not in said
    assert len(manifest_of(tmp_path / "out")["source"]["notes"]) == 2


@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_whole_numbers_that_lose_digits_are_told(tmp_path, capfd, form):
    draw = np.random.default_rng(0)
    views = draw.integers(2**24, 2**26, 300)
    frame = pd.DataFrame({"y": draw.integers(0, 2, 300), "user": 1, "views": views})
    # A fraction is no whole number, and 2^25 is exact.
    frame["price"], frame["size"] = 2**25 / 3, 2**25
    path = tmp_path / f"log.{form}"
    frame.to_csv(path, index=False) if form == "csv" else frame.to_parquet(path)
    arrays(tmp_path, [path], "label: y\nids: [user]\nnumbers: [price, size, views]")
    count = int((views.astype(np.float32).astype(np.int64) != views).sum())
    said = " ".join(capfd.readouterr().out.split())
    assert said.count("to float32") == 1 and count > 100
    assert f"rounded {count} whole numbers above 16,777,216 to float32: views {count};" in said


def booleans(kind):
    """100 rows with a boolean column in a form."""
    values = np.random.default_rng(0).random(100) < 0.4
    words = {"True": ("False", "True"), "true": ("false", "true"), "TRUE": ("FALSE", "TRUE")}
    member = values if kind == "bool" else [words[kind][int(value)] for value in values]
    return pd.DataFrame({"member": member, "item": np.arange(100) % 7})


@pytest.mark.parametrize("written", ["True", "true", "TRUE"])
def test_booleans_as_labels_and_parts(tmp_path, written):
    schema = f"label: {{column: member, positive: ['{written}']}}\nids: [item]\n"
    split = {"split": "by_column", "split_column": "member", "test_values": [written]}
    expected = booleans("bool")["member"]
    for form in ("bool", "True", "true", "TRUE"):
        folder = tmp_path / form
        folder.mkdir()
        booleans(form).to_parquet(folder / "log.parquet")
        booleans(form).to_csv(folder / "log.csv", index=False)
        for name in ("log.parquet", "log.csv"):
            log = RawLog(Schema.model_validate(yaml.safe_load(schema)), [folder / name])
            labels = next(log.chunks(BadRows("error"))).frame["#label"]
            assert labels.to_list() == expected.to_list()
        one = "label: {column: item, at_least: 3}\nids: [member]\n"
        found = arrays(folder, [folder / "log.parquet"], one, **split)
        assert len(found["test"]["label"]) == expected.sum()


@pytest.mark.parametrize("older, rules", [('"rules": 2,', 2), ("", 1)])
def test_what_older_versions_prepared_is_refused(tmp_path, older, rules):
    """They read values in another way, see `rules` of the schema; the first had no such key."""
    drawn().to_csv(tmp_path / "log.csv", index=False)
    arrays(tmp_path, [tmp_path / "log.csv"])
    path = tmp_path / "out/learned/learned.json"
    text = path.read_text()
    assert text.count('"rules": 3,') == 1
    path.write_text(text.replace('"rules": 3,', older))
    said = rf"learned.json: an older version .* \(rules {rules} instead of 3\); prepare the log and"
    with pytest.raises(DataError, match=said):
        load(path.parent)
