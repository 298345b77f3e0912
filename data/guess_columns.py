"""What a column of a log seems to hold: ids, numbers, or the part that each row belongs to."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

import numpy as np
import polars as pl

# Whole numbers with fewer different values, or with so many rows of each, are ids: each value gets
# an embedding that is trained well.
_FEW, _MANY_ROWS = 20, 100
# Whole numbers are amounts if they thin out: if their values are this uneven (the largest distance
# of their empirical distribution above an even one), and if the mean and the median gap of their
# last quarter are so many times those before.
_UNEVEN, _MEAN_GROWTH, _MEDIAN_GROWTH = 0.2, 2.5, 1.5
# Larger ones lose digits as numbers, which are float32.
_LARGEST = 2**24

NAME_OF_AN_ID = re.compile(r"([a-z]Id|ID|(^|_)id)$")
_OF_AMOUNTS = {
    "age", "ages", "amount", "amounts", "area", "avg", "average", "balance", "bid", "budget",
    "clicks", "cnt", "cost", "costs", "count", "counts", "credit", "days", "debt", "discount",
    "distance", "duration", "fare", "fee", "fees", "gain", "height", "hours", "impressions",
    "income", "length", "loss", "mean", "miles", "mins", "minutes", "months", "nights", "num",
    "percent", "price", "prices", "qty", "quantity", "rate", "ratio", "revenue", "salary",
    "sales", "score", "seconds", "secs", "size", "speed", "stock", "sum", "temp", "temperature",
    "total", "value", "views", "visits", "volume", "wage", "weight", "width", "years",
}  # fmt: skip
_OF_IDS = {
    "account", "ad", "advertiser", "app", "brand", "campaign", "category", "cell", "city",
    "code", "country", "creative", "customer", "device", "domain", "group", "hash", "host",
    "ip", "item", "key", "manager", "member", "movie", "order", "page", "phone", "product",
    "publisher", "query", "region", "resource", "role", "session", "shop", "site", "slot",
    "sku", "store", "tag", "title", "token", "type", "url", "user", "zip", "zone",
}  # fmt: skip
_PARTS = ("part", "split", "fold")
_OF_TEST = re.compile(r"test|eval|hold", re.IGNORECASE)
_OF_VALIDATION = re.compile(r"val|dev", re.IGNORECASE)
_OF_TRAINING = re.compile(r"train|learn|fit", re.IGNORECASE)
MOST_PARTS = 20


def number_or_ids(values: pl.Series) -> tuple[bool, str]:
    """Whether a column is a number (else its values are ids), and why.

    Args:
        values: neither nested nor times.
    """
    name, kind = values.name, values.dtype
    if not kind.is_numeric():
        return False, "true and false" if kind == pl.Boolean else "texts"
    present = values.drop_nulls().cast(pl.Float64)
    if (present != present.round()).any():
        return True, "fractions"
    distinct = np.unique(present.to_numpy())
    words = {word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)}
    if NAME_OF_AN_ID.search(name):
        return False, "whole numbers named id"
    # Before the cast: it makes one of ids of more than 15 digits.
    if values.drop_nulls().n_unique() < _FEW:
        return False, f"whole numbers, fewer than {_FEW} different ones"
    if abs(distinct).max() < _LARGEST:
        if distinct[0] < -1:
            return True, "whole numbers, some below 0"
        if words & _OF_AMOUNTS:
            return True, "whole numbers named like an amount"
        if len(present) >= _MANY_ROWS * len(distinct):
            return False, "whole numbers, each in many rows"
        if not words & _OF_IDS and _thin_out(distinct):
            return True, "whole numbers that are close where small and far apart where large"
    return False, "whole numbers"


def _thin_out(distinct: np.ndarray) -> bool:
    """Whether sorted different values lie further apart as they grow: counts and prices do.

    Ids are numbered one after the other or drawn at random, so their gaps are alike everywhere.
    """
    # A single value may stand for all others, such as -1 or 9999.
    cut = max(1, len(distinct) // 50)
    inner = distinct[cut:-cut]
    even = np.linspace(0, 1, len(inner))
    uneven = (even - (inner - inner[0]) / (inner[-1] - inner[0])).max()
    gaps = np.diff(inner)
    small, large = gaps[: len(gaps) // 2], gaps[-(len(gaps) // 4) :]
    return bool(
        uneven >= _UNEVEN
        and large.mean() >= _MEAN_GROWTH * small.mean()
        and np.median(large) >= _MEDIAN_GROWTH * np.median(small)
    )


def part_column(head: pl.DataFrame) -> str | None:
    """The column that seems to hold the part of each row."""
    for name in head.columns:
        if name.lower() in _PARTS and not head[name].dtype.is_nested():
            return name if head[name].n_unique() <= MOST_PARTS else None
    return None


def split_by(column: str, values: Collection[str]) -> tuple[dict[str, Any], str]:
    """Keys of the configuration that split a log by a column, and why; none if no value says how.

    Args:
        values: the column's different values.
    """
    keys = {"split": "by_column", "split_column": column}
    ordered = sorted(values)
    test = [one for one in ordered if _OF_TEST.search(one)]
    validation = [one for one in ordered if _OF_VALIDATION.search(one) and one not in test]
    if any(_OF_TRAINING.match(one) for one in ordered) and (test or validation):
        keys["test_values"] = test or validation
        if test and validation:
            keys["validation_values"] = validation
        return keys, f"its values {', '.join(ordered)} name the parts"
    if len(values) > 1 and all(one.isdecimal() for one in values):
        last = max(values, key=int)
        return {**keys, "test_values": [last]}, f"the last fold, {last}, is the test part"
    return {}, ""
