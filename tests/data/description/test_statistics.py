"""Statistics of raw logs against pandas, numpy and scikit-learn."""

import tempfile
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from sklearn.metrics import roc_auc_score

from stampede.data.description.statistics import collect, read_rows
from stampede.data.options import Split
from stampede.data.raw.rows import BadRows
from stampede.data.sources import open_source


def described(folder, limit=None, **split):
    """Statistics of the log in a folder, and the part of each row."""
    source = open_source(
        "table",
        str(folder / "log_*.csv"),
        Split.model_validate(split),
        schema=str(folder / "schema.yaml"),
        features="paper",
    )
    with tempfile.TemporaryDirectory() as spool:
        rows = read_rows(source, BadRows("error"), limit, Path(spool))
        return collect(rows), rows.frame.select("#part").collect()["#part"].to_numpy()


def values_of(frame, name):
    """A column's values, one per row or several; a row without one has NaN."""
    column = frame[name].replace("", np.nan)
    return column.str.split("|").explode() if name == "tags" else column


def auc_by_hand(frame, parts, name):
    """Of the click rates that a column's ids have in the training part, drawn to the mean."""
    values = values_of(frame, name).fillna("missing").rename("id")
    rows = values.to_frame().join(frame["clicked"]).join(pd.Series(parts, name="part"))
    train = rows[rows["part"] == 0]
    seen = train.groupby("id")["clicked"].agg(["sum", "size"])
    rate = (seen["sum"] + 20 * train["clicked"].mean()) / (seen["size"] + 20)
    test = rows[rows["part"] == 2]
    return roc_auc_score(test["clicked"], test["id"].map(rate).fillna(train["clicked"].mean()))


@pytest.mark.parametrize("split", ["sequential", "random"])
def test_a_log_against_pandas(log, split):
    folder, frame = log
    found, parts = described(folder, split=split)
    if split == "sequential":
        # The last tenth is for the test, the last tenth of the rest for validation.
        assert parts.tolist() == np.repeat([0, 1, 2], [2430, 270, 300]).tolist()
    np.testing.assert_array_equal(found.rows, np.bincount(parts, minlength=3))
    np.testing.assert_array_equal(found.clicks, np.bincount(parts, frame["clicked"], 3))
    assert [column.name for column in found.ids] == ["site", "user", "tags"]
    for column in found.ids:
        values = values_of(frame, column.name)
        counts = values.value_counts()
        assert column.distinct == len(counts)
        for top in (1, 10, 100, 1000):
            expected = counts.iloc[:top].sum() / counts.sum()
            assert column.coverage(top) == pytest.approx(expected)
        assert counts[column.top].tolist() == counts.iloc[:10].tolist()
        clicks = frame["clicked"].loc[values.index].groupby(values.to_numpy()).sum()
        assert column.rates[:, 0].tolist() == counts[column.top].tolist()
        assert column.rates[:, 1].tolist() == clicks[column.top].tolist()
        known = set(values_of(frame[parts == 0], column.name).dropna())
        for part in range(3):
            within = values_of(frame[parts == part], column.name)
            assert column.share("missing", part) == pytest.approx(within.isna().mean())
            unseen = (~within.isin(known) & within.notna()).mean()
            assert column.share("unseen", part) == pytest.approx(unseen)
        assert column.alone == pytest.approx(auc_by_hand(frame, parts, column.name))
    assert any(column.unseen[2] for column in found.ids)
    (price,) = found.numbers
    present = frame["price"].dropna()
    quantiles = np.quantile(present, [0.25, 0.5, 0.75, 0.99], method="nearest")
    expected = [present.mean(), present.min(), *quantiles, present.max()]
    np.testing.assert_allclose(price.summary, expected, rtol=1e-12)
    quarters = np.searchsorted(quantiles[:3], present) + 1
    rows, clicks = np.bincount(quarters), np.bincount(quarters, frame["clicked"][present.index])
    np.testing.assert_array_equal(price.rates[1:], np.stack([rows, clicks], 1)[1:])
    assert price.rates[0].tolist() == [
        frame["price"].isna().sum(), frame["clicked"][frame["price"].isna()].sum()
    ]  # fmt: skip
    for part in range(3):
        missing = frame["price"][parts == part].isna().mean()
        assert price.share("missing", part) == pytest.approx(missing)
    edges, rows, _ = price.histogram
    np.testing.assert_array_equal(rows, np.histogram(present, edges)[0])
    hours = frame.groupby(frame["seen"] // 3600 * 3600)["clicked"].agg(["size", "sum"])
    assert found.by_time and found.width == 3600
    assert found.slices.rows() == list(hours.itertuples(name=None))


@pytest.mark.parametrize("limit", [1, 1700])
def test_the_first_rows(log, limit):
    folder, frame = log
    found, parts = described(folder, limit)
    assert found.rows.sum() == min(limit, 3000)
    assert found.clicks.sum() == frame["clicked"][:limit].sum()
    train = int(0.9 * min(limit, 3000))
    kept = [train - int(0.1 * train), int(0.1 * train), min(limit, 3000) - train]
    assert np.bincount(parts, minlength=3).tolist() == kept
