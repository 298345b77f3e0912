"""Descriptions of raw logs against pandas and numpy."""

import numpy as np
import pandas as pd
import pytest

from stampede.data.description.collector import collect
from stampede.data.description.inputs import RawInput
from stampede.data.raw import BadRows
from stampede.data.sources import open_source
from stampede.data.splits import Split
from support.described import raw_input
from support.paths import shared


def values_of(frame, name):
    """A column's values, one per row or several; a row without one has NaN."""
    column = frame[name].replace("", np.nan)
    return column.str.split("|").explode() if name == "tags" else column


def check_against_pandas(found, frame, parts):
    """`parts` is the part of each row of the frame."""
    np.testing.assert_array_equal(found.rows, np.bincount(parts, minlength=3))
    np.testing.assert_array_equal(found.positives, np.bincount(parts, frame["clicked"], 3))
    assert [column.name for column in found.ids] == ["site", "user", "tags"]
    for column in found.ids:
        values = values_of(frame, column.name)
        counts = values.value_counts()
        assert column.distinct == len(counts)
        for top in (1, 10, 100, 1000):
            expected = counts.iloc[:top].sum() / counts.sum()
            assert column.coverage(top) == pytest.approx(expected)
        assert counts[column.top].tolist() == counts.iloc[:3].tolist()
        known = set(values_of(frame[parts == 0], column.name).dropna())
        for part in range(3):
            within = values_of(frame[parts == part], column.name)
            assert column.by_part.missing_share(part) == pytest.approx(within.isna().mean())
            unseen = (~within.isin(known) & within.notna()).mean()
            assert column.by_part.unseen_share(part) == pytest.approx(unseen)
    assert any(column.by_part.unseen[2] for column in found.ids)
    (price,) = found.numbers
    present = frame["price"].dropna()
    assert (price.range.low, price.range.high) == (present.min(), present.max())
    assert price.range.mean == pytest.approx(present.mean())
    expected = np.quantile(present, [0.25, 0.5, 0.75, 0.99], method="inverted_cdf")
    np.testing.assert_array_equal(price.quantiles, expected)
    for part in range(3):
        missing = frame["price"][parts == part].isna().mean()
        assert price.by_part.missing_share(part) == pytest.approx(missing)


def test_a_log_against_pandas(log):
    folder, frame = log
    # The last tenth is for the test, the last tenth of the rest for validation.
    parts = np.repeat([0, 1, 2], [2430, 270, 300])
    check_against_pandas(collect(raw_input(folder)), frame, parts)


def test_a_random_split_against_pandas(log):
    folder, frame = log
    parts = np.concatenate([piece.parts for piece in raw_input(folder, split="random").pieces()])
    assert 0 < parts[:1000].sum() < len(parts)
    check_against_pandas(collect(raw_input(folder, split="random")), frame, parts)


@pytest.mark.parametrize("limit", [1, 30, 1000, 1700, 5000])
def test_the_first_rows_only(log, limit):
    folder, frame = log
    found = collect(raw_input(folder, limit))
    rows = min(limit, 3000)
    assert found.rows.sum() == rows
    assert found.positives.sum() == frame["clicked"][:rows].sum()
    assert found.ids[0].distinct == frame["site"][:rows].nunique()
    # The parts are those of a log that has no more rows.
    assert found.rows[2] == rows - int(0.9 * rows)


def test_label_rate_over_time(log):
    folder, frame = log
    slices = collect(raw_input(folder)).slices
    assert slices.by_time
    assert slices.width == 3600
    by_hour = frame.groupby(frame["seen"] // 3600 * 3600)["clicked"].agg(["size", "sum"])
    assert slices.table["start"].to_list() == by_hour.index.tolist()
    assert slices.table["rows"].to_list() == by_hour["size"].tolist()
    assert slices.table["positives"].to_list() == by_hour["sum"].tolist()


def test_real_rows_against_pandas(tmp_path):
    path = shared("data/avazu_20k.csv.gz")
    frame = pd.read_csv(path, dtype=str)
    source = open_source("avazu", str(path), Split(), features="paper")
    found = collect(RawInput(source, BadRows("error"), None))
    trained = frame[: int(0.9 * len(frame)) - int(0.1 * int(0.9 * len(frame)))]
    test = frame[int(0.9 * len(frame)) :]
    assert found.rows[[0, 2]].tolist() == [len(trained), len(test)]
    for column in found.ids:
        assert column.distinct == frame[column.name].nunique()
        unseen = (~test[column.name].isin(set(trained[column.name]))).mean()
        assert column.by_part.unseen_share(2) == pytest.approx(unseen)
    hours = pd.to_datetime(frame["hour"], format="%y%m%d%H").dt.floor("6h")
    clicks = frame["click"].astype(int).groupby(hours).agg(["size", "sum"])
    assert found.slices.width == 6 * 3600
    assert found.slices.table["start"].to_list() == [int(time.timestamp()) for time in clicks.index]
    assert found.slices.table["positives"].to_list() == clicks["sum"].tolist()
