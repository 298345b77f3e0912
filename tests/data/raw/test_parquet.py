"""Types of Parquet columns."""

import polars as pl
import pytest

from stampede.data import DataError
from support.raw_logs import log_of, read

PARQUET = {
    "y": [1, 0, 1],
    "user": ["anna", "NA", None],
    "slot": [1, 2, None],
    "x": [0.5, None, 2.0],
    "w": [1.0, 2.0, 3.0],
    "t": ["2024-01-31"] * 3,
}


@pytest.mark.parametrize(
    "column, kind",
    [
        ("user", pl.Categorical),
        ("user", pl.Enum(["anna", "NA"])),
        ("y", pl.Boolean),
        ("x", pl.Decimal(10, 2)),
        ("w", pl.Int8),
        ("slot", pl.String),
        ("t", pl.Date),
        ("t", pl.Datetime("ms")),
    ],
)
def test_types_of_parquet_columns(tmp_path, column, kind):
    frame = pl.DataFrame(PARQUET)
    values = frame[column]
    if column == "t":
        values = values.str.to_date()
    path = tmp_path / "log.parquet"
    frame.with_columns(values.cast(kind)).write_parquet(path)
    found, _, _ = read(log_of(path, missing=["", "NA"]))
    assert found["user"].to_list() == ["anna", None, None]
    assert found["slot"].to_list() == [1, 2, None] and found["x"].to_list() == [0.5, None, 2.0]
    assert found["#label"].to_list() == [1.0, 0.0, 1.0]
    assert found["#time"].to_list() == [1706659200] * 3


@pytest.mark.parametrize(
    "column, values",
    [
        ("y", [[1], [0], [1]]),
        ("x", [b"1", b"2", b"3"]),
        ("user", [["a"], ["b"], []]),
        ("user", [{"a": 1}] * 3),
        ("user", [b"a", b"\xff", b"c"]),
        ("t", [1.5, 2.5, 3.5]),
    ],
)
def test_types_of_parquet_columns_that_are_of_no_use(tmp_path, column, values):
    path = tmp_path / "log.parquet"
    pl.DataFrame({**PARQUET, column: values}).write_parquet(path)
    with pytest.raises(DataError, match=rf"log.parquet: column {column} is stored as"):
        read(log_of(path))
