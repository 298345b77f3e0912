"""Structs, lists of structs and maps of Parquet files, named `COLUMN.NAME` in the schema."""

import polars as pl
import pyarrow
import pyarrow.parquet
import pytest

from stampede.data import DataError
from stampede.data.raw.log import RawLog
from stampede.data.raw.rows import BadRows
from stampede.data.schema.schema import Schema
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
