"""Times of a log in every format, against pandas."""

import numpy as np
import pandas as pd
import polars as pl
import pytest
import yaml

from stampede.data import DataError
from stampede.data.guess import guess
from stampede.data.raw.log import RawLog
from stampede.data.raw.rows import BadRows
from stampede.data.schema.schema import Schema
from stampede.settings import SettingsError

TIMES = pd.date_range("2026-03-05 00:00:06", periods=40, freq="5h17min3s")
UNITS = {"seconds": 10**9, "milliseconds": 10**6, "microseconds": 10**3}


def read(path, frame, format=None):
    """`#time` of a log's rows."""
    if path.suffix == ".csv":
        frame.to_csv(path, index=False)
    else:
        frame.to_parquet(path)
    time = {"column": "t"} | ({} if format is None else {"format": format})
    schema = Schema.model_validate({"label": "y", "ids": ["user"], "time": time})
    return next(RawLog(schema, [path]).chunks(BadRows("error"))).frame["#time"].to_list()


def log(times):
    n = len(times)
    return pd.DataFrame({"y": np.arange(n) % 2, "user": np.arange(n) % 7, "t": times})


@pytest.mark.wide
@pytest.mark.parametrize(
    "unit, form", [*((unit, "parquet") for unit in UNITS), ("microseconds", "csv")]
)
def test_epochs(tmp_path, unit, form):
    path, numbers = tmp_path / f"log.{form}", TIMES.as_unit("ns").asi8 // UNITS[unit]
    expected = (TIMES.as_unit("ns").asi8 // 10**9).tolist()
    for times in (numbers, numbers.astype(float), [*map(str, numbers)]):
        assert read(path, log(times), unit) == expected
        for other in UNITS:
            if other != unit:
                with pytest.raises(DataError, match=f"column t: .*format: '{unit}'"):
                    read(path, log(times), other)
    described = guess([path])
    assert Schema.model_validate(described.schema).time.format == unit
    assert described.schema["time"]["column"] == "t" and set(described.schema["ids"]) == {"user"}


WITH_OFFSET = "%Y-%m-%dT%H:%M:%S.250+05:30"
SHOWN = (
    "%Y-%m-%dT%H:%M:%S", "%Y-%m-%dT%H:%M:%SZ", "%Y-%m-%d %H:%M:%S.%f", "%Y-%m-%dT%H:%MZ",
    WITH_OFFSET, "%Y-%m-%d %H:%M:%S-0800", "%Y-%m-%dT%H:%M:%S+01", "%Y-%m-%d",
)  # fmt: skip
# A column of texts is the same in Parquet.
OF_PARQUET = [("%Y-%m-%d", "parquet"), (WITH_OFFSET, "parquet")]


@pytest.mark.parametrize("shown, form", [*((shown, "csv") for shown in SHOWN), *OF_PARQUET])
def test_iso8601(tmp_path, shown, form):
    path, texts = tmp_path / f"log.{form}", TIMES.strftime(shown)
    expected = pd.to_datetime(texts, utc=True, format="ISO8601").as_unit("ns").asi8 // 10**9
    assert read(path, log(texts), "iso8601") == expected.tolist()
    found = guess([path]).schema["time"]
    assert read(path, log(texts), found.get("format")) == expected.tolist()
    # Without a format, the message gives one that works.
    with pytest.raises(DataError, match=r"column t: .*or train with `time: \{") as refused:
        read(path, log(texts))
    said = yaml.safe_load(str(refused.value).split("`")[1])["time"]
    assert read(path, log(texts), said["format"]) == expected.tolist()


def test_bad_times(tmp_path):
    path = tmp_path / "log.csv"
    bad = ["2026-02-30", "2026-03-05T25:00", "2026-03-05T", "", "5", "1889-01-01", "2100-01-01"]
    for text in bad:
        times = ["2026-03-05T00:00:00", text]
        with pytest.raises(DataError, match=r"line 3, column t: found .* as iso8601"):
            read(path, log(times), "iso8601")
    for when, is_good in (("1990-01-01", True), ("1989-12-31", False), ("2100-01-01", False)):
        frame = log(pd.to_datetime([when]))
        if is_good:
            assert read(tmp_path / "log.parquet", frame) == [631152000]
        else:
            with pytest.raises(DataError, match="write a time in 1990 to 2099"):
                read(tmp_path / "log.parquet", frame)
    with pytest.raises((SettingsError, ValueError), match="found 'ms'; write seconds, milli"):
        read(path, log(["1"]), "ms")
    # A float32 has a value every two minutes.
    with pytest.raises(DataError, match="column t is stored as Float32"):
        read(tmp_path / "log.parquet", log(np.array([1.7e9], np.float32)))


def test_describe_makes_no_time_an_id_and_no_id_a_time(tmp_path):
    draw, n = np.random.default_rng(0), 300
    seconds = 1_772_668_806 + np.sort(draw.integers(0, 10**6, n))
    frame = pl.DataFrame(
        {
            "click": draw.integers(0, 2, n),
            "user": draw.integers(1_000_000_000, 2_000_000_000, n),
            "seen": seconds,
            "sent": seconds * 1000,
            "created_at": [f"2026-03-{day:02d}T10:00:00.5Z" for day in draw.integers(1, 29, n)],
            "day": [f"202603{day:02d}" for day in draw.integers(1, 29, n)],
            "code": draw.integers(10_000_000, 99_999_999, n),
            # An order's number, within two years of seconds.
            "order": draw.integers(1_700_000_000, 1_760_000_000, n),
        }
    )
    frame.write_csv(tmp_path / "log.csv")
    found = guess([tmp_path / "log.csv"])
    assert found.schema["time"] == {"column": "created_at", "format": "iso8601"}
    assert set(found.schema["ids"]) == {"user", "code", "order"}
    assert "'day (a time)'" in found.reason[-1] and "'seen (a time)'" in found.reason[-1]


def test_times_without_a_name_ascend(tmp_path):
    """Also where rows are a little out of order; numbers in any order have the name of a time."""
    draw, n = np.random.default_rng(1), 400
    ascending = 1_772_668_806 + np.arange(n) * 60 + draw.integers(0, 3600, n)
    for name, values, is_time in [
        ("x", ascending, True),
        ("x", draw.permutation(ascending), False),
        ("ts", draw.permutation(ascending), True),
        ("event_time", draw.permutation(ascending), True),
    ]:
        frame = log(values).rename(columns={"t": name})
        frame.to_csv(tmp_path / "log.csv", index=False)
        assert ("time" in guess([tmp_path / "log.csv"]).schema) == is_time
