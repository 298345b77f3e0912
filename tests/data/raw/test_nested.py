"""Structs, lists of structs and maps of Parquet files, named `COLUMN.NAME` in the schema."""

import json

import pandas as pd
import polars as pl
import pyarrow
import pyarrow.parquet
import pytest

from stampede.data import DataError
from stampede.data.raw.log import RawLog
from stampede.data.raw.rows import BadRows
from stampede.data.schema.schema import Schema, column_of_weights
from stampede.engine.inference.frames import columns_of

# The same log with columns of their own.
FLAT = {
    "clicked": [1, 0, 0, 1],
    "os": ["ios", None, "android", "ios"],
    "city.name": ["a", "b", None, "c"],
    "item": [["i1", "i2"], [], None, ["i3", "i1"]],
    "price": [[0.5, 2.0], [], None, [1.0, -1.0]],
    "tag": [["red"], ["blue", "red"], None, []],
    "score": [[0.25], [1.0, 3.0], None, []],
}
ORDERS = pyarrow.list_(pyarrow.struct([("item", pyarrow.string()), ("price", pyarrow.float64())]))


def pairs(first, second):
    return [None if one is None else list(zip(one, two, strict=True)) for one, two in
            zip(first, second, strict=True)]  # fmt: skip


def nested_table():
    orders = [
        None if cell is None else [{"item": item, "price": price} for item, price in cell]
        for cell in pairs(FLAT["item"], FLAT["price"])
    ]
    scores = pairs(FLAT["tag"], FLAT["score"])
    of_map = pyarrow.map_(pyarrow.string(), pyarrow.float32())
    device = [
        None if os is None and city is None else {"os": os, "place": {"city": city}}
        for os, city in zip(FLAT["os"], FLAT["city.name"], strict=True)
    ]
    return pyarrow.table(
        {
            "clicked": FLAT["clicked"],
            "device": device,
            "city.name": FLAT["city.name"],
            # Its `name` is not what `city.name` means.
            "city": [{"name": "other"}] * 4,
            "orders": pyarrow.array(orders, ORDERS),
            "scores": pyarrow.array(scores, of_map),
        }
    )


def schema_of(**columns):
    ids = {
        "os": {"column": columns["os"]},
        "city": {"column": columns["city"]},
        "bought": {"column": columns["item"], "separator": "|", "weights": columns["price"]},
        "tags": {"column": columns["tag"], "separator": "|", "weights": columns["score"]},
    }
    return Schema.model_validate({"label": "clicked", "ids": ids})


NESTED = schema_of(
    os="device.os",
    city="city.name",
    item="orders.item",
    price="orders.price",
    tag="scores.key",
    score="scores.value",
)


def chunk(schema, path):
    return next(RawLog(schema, [path]).chunks(BadRows("error"))).frame


def test_they_are_read_as_columns_of_their_own(tmp_path):
    pyarrow.parquet.write_table(nested_table(), tmp_path / "nested.parquet")
    pyarrow.parquet.write_table(pyarrow.table(FLAT), tmp_path / "flat.parquet")
    own = {name: name for name in ("os", "item", "price", "tag", "score")}
    flat = chunk(schema_of(city="city.name", **own), tmp_path / "flat.parquet")
    nested = chunk(NESTED, tmp_path / "nested.parquet")
    assert flat["bought"].to_list() == [["i1", "i2"], [], None, ["i3", "i1"]]
    assert nested.to_dict(as_series=False) == flat.to_dict(as_series=False)


def test_structs_within_structs(tmp_path):
    pyarrow.parquet.write_table(nested_table(), tmp_path / "nested.parquet")
    schema = {"label": "clicked", "ids": {"city": {"column": "device.place.city"}}}
    found = chunk(Schema.model_validate(schema), tmp_path / "nested.parquet")
    assert found["city"].to_list() == FLAT["city.name"]


def test_a_name_that_is_absent(tmp_path):
    pyarrow.parquet.write_table(nested_table(), tmp_path / "nested.parquet")
    schema = Schema.model_validate({"label": "clicked", "ids": {"os": {"column": "device.so"}}})
    with pytest.raises(DataError, match=r"no column 'device\.so'; its columns are .*device\.os"):
        chunk(schema, tmp_path / "nested.parquet")


@pytest.mark.parametrize("library", ["polars", "arrow", "pandas"])
def test_frames_keep_the_columns_that_hold_them(tmp_path, library):
    table = nested_table()
    frame = {
        "polars": pl.from_arrow,
        "arrow": lambda table: table,
        "pandas": lambda table: table.to_pandas(),
    }[library](table)
    used = {"device.os", "orders.item", "city.name"}
    found = columns_of(frame, used)
    assert set(found.columns) == {"device", "orders", "city.name"}
    ids = {"os": {"column": "device.os"}, "item": {"column": "orders.item", "separator": "|"}}
    schema = {"label": "label", "ids": ids}
    found.with_columns(label=pl.lit(1)).write_parquet(tmp_path / "frame.parquet")
    read = chunk(Schema.model_validate(schema), tmp_path / "frame.parquet")
    assert read["os"].to_list() == FLAT["os"]
    assert read["item"].to_list() == FLAT["item"]


@pytest.mark.parametrize(
    "kind", [pyarrow.timestamp("us", "+05:30"), pyarrow.list_view(pyarrow.int8())]
)
def test_columns_of_other_types_that_nobody_uses(tmp_path, kind):
    table = nested_table().append_column("other", pyarrow.nulls(4, kind))
    try:
        pyarrow.parquet.write_table(table, tmp_path / "nested.parquet")
    except pyarrow.ArrowNotImplementedError:
        pytest.skip(f"this PyArrow does not write {kind}")
    assert chunk(NESTED, tmp_path / "nested.parquet")["os"].to_list() == FLAT["os"]


def test_two_columns_of_one_name_that_nobody_uses(tmp_path):
    table = nested_table()
    for _ in range(2):
        table = table.append_column("other", table["clicked"])
    pyarrow.parquet.write_table(table, tmp_path / "nested.parquet")
    assert chunk(NESTED, tmp_path / "nested.parquet")["os"].to_list() == FLAT["os"]


def test_encoded_texts_and_lists_of_one_length(tmp_path):
    texts = pyarrow.dictionary(pyarrow.int8(), pyarrow.string())
    seen = [[{"item": "a"}, {"item": "b"}], [{"item": "c"}, {"item": "a"}]]
    of_two = pyarrow.array(seen).cast(
        pyarrow.list_(pyarrow.struct([("item", pyarrow.string())]), 2)
    )
    items = pyarrow.array([["a", "b"], ["c"]], pyarrow.list_(pyarrow.string()))
    table = {"label": [0, 1], "seen": of_two, "items": items.cast(pyarrow.list_(texts))}
    pyarrow.parquet.write_table(pyarrow.table(table), tmp_path / "log.parquet")
    ids = {"seen": {"column": "seen.item", "separator": "|"}, "items": {"separator": "|"}}
    found = chunk(Schema.model_validate({"label": "label", "ids": ids}), tmp_path / "log.parquet")
    assert found["seen"].to_list() == [["a", "b"], ["c", "a"]]
    assert found["items"].to_list() == [["a", "b"], ["c"]]


@pytest.mark.parametrize(
    "orders, device, os",
    [
        ([], {"os": "ios"}, "ios"),
        (None, None, None),
        ([{"price": 0.5}], {}, None),
        ([{"item": None}], {"os": None}, None),
        ([{"item": float("nan")}], {"os": pd.NA}, None),
    ],
)
@pytest.mark.parametrize("library", [pd.DataFrame, pl.DataFrame])
def test_frames_without_any_value(tmp_path, orders, device, os, library):
    if library is pl.DataFrame and device and device["os"] is pd.NA:
        pytest.skip("pandas' own")
    frame = library({"label": [1], "orders": [orders], "device": [device]})
    found = columns_of(frame, {"label", "orders.item", "device.os"})
    found.write_parquet(tmp_path / "frame.parquet")
    ids = {"os": {"column": "device.os"}, "item": {"column": "orders.item", "separator": "|"}}
    schema = Schema.model_validate({"label": "label", "ids": ids})
    read = chunk(schema, tmp_path / "frame.parquet")
    assert read["os"].to_list() == [os]
    assert not (read["item"].to_list()[0] or [])


def test_maps_of_pandas_frames(tmp_path):
    pyarrow.parquet.write_table(nested_table(), tmp_path / "nested.parquet")
    frame = pd.read_parquet(tmp_path / "nested.parquet")
    found = columns_of(frame, {"clicked", "scores.key", "scores.value"})
    found.write_parquet(tmp_path / "frame.parquet")
    ids = {"tags": {"column": "scores.key", "weights": "scores.value", "separator": "|"}}
    schema = Schema.model_validate({"label": "clicked", "ids": ids})
    read = chunk(schema, tmp_path / "frame.parquet")
    expected = chunk(schema, tmp_path / "nested.parquet")
    assert read.to_dict(as_series=False) == expected.to_dict(as_series=False)


OF_OBJECTS = {
    "tags": {"column": "scores.key", "weights": "scores.value", "separator": "json"},
    "levels": {"column": "scores.value", "separator": "json"},
}
OBJECTS = [
    '{"a": 0.5, "b, \\"c\\": {": -2e1}', " { } ", None, '{"\\u00e9":1}', '{"a\\\\": 3 , "a": 0}',
]  # fmt: skip


@pytest.mark.parametrize("form", ["csv", "parquet", "frame"])
def test_objects_in_texts(tmp_path, form):
    schema = Schema.model_validate({"label": "clicked", "ids": OF_OBJECTS})
    frame = pl.DataFrame({"clicked": [1, 0, 0, 1, 0], "scores": OBJECTS})
    path = tmp_path / ("log.csv" if form == "csv" else "log.parquet")
    if form == "frame":
        frame = columns_of(frame, {"clicked", "scores.key", "scores.value"})
    frame.write_csv(path) if form == "csv" else frame.write_parquet(path)
    found = chunk(schema, path)
    cells = [None if cell is None else json.loads(cell) for cell in OBJECTS]
    assert found["tags"].to_list() == [None if cell is None else [*cell] for cell in cells]
    weights = [None if cell is None else [*cell.values()] for cell in cells]
    assert found[column_of_weights("tags")].to_list() == weights
    texts = [["0.5", "-20"], [], None, ["1"], ["3", "0"]]
    assert found["levels"].to_list() == texts


@pytest.mark.parametrize(
    "ids, cell, said",
    [
        (OF_OBJECTS, '{"a": }', r"line 3, column scores.key: found .*; write a JSON object of "),
        (OF_OBJECTS, '{"a": [1]}', r"column scores.key: found .*such as \{\"a\": 0.5, \"b\": 2\}"),
        (OF_OBJECTS, '["a"]', r"found .*\[\"a\"\] \(a list\).*; write a JSON object of "),
        (OF_OBJECTS, '{"a": "x"}', r"column scores.value: found .*write finite numbers"),
        (
            {"tags": {"column": "scores.key", "separator": ","}}, '{"a": 1}',
            r"no column 'scores.key'; .* `separator: json` if scores holds JSON objects",
        ),
    ],
)  # fmt: skip
def test_what_is_no_object_is_refused(tmp_path, ids, cell, said):
    frame = pl.DataFrame({"clicked": [1, 0], "scores": ['{"a": 1}', cell]})
    frame.write_csv(tmp_path / "log.csv")
    schema = Schema.model_validate({"label": "clicked", "ids": ids})
    with pytest.raises(DataError, match=said):
        chunk(schema, tmp_path / "log.csv")
