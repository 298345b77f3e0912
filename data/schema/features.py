"""What `data.features` adds to a schema, and what it settles by the training part."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

from stampede.data.schema.schema import IdField, Quantiles, Schema, TimePart, Vocabulary
from stampede.settings import SettingsError

# How to fill in what a schema leaves open: `auto` by the training part; `paper` as the CowClip
# paper's code (arXiv 2204.06240): every id gets a row, numbers are scaled to [0, 1].
Features = Literal["auto", "paper"]

# 20 to 100 bins gave the same AUC within 0.0005 on 137 thousand rows of Criteo.
BINS = 40
_BIN = "_bin"

# `min_count` for fewer training rows than this. A row of its own for an id that is seen once
# overfits: 0.01 AUC less on 16 thousand rows of Avazu; with fewer rows most ids are seen once.
# BARS uses 2 for Avazu_x4 and 10 for Criteo_x4 (36.7 million training rows).
_MIN_COUNTS = ((10_000, 1), (10_000_000, 2), (math.inf, 10))

# Of ids that are rarer than the chosen `min_count`, at this share of the training rows and more,
# one row is learned. Of fewer it would be learned from too few rows for all the ids that come
# later, and would save no memory: 0.003 AUC less on 16 thousand rows of Avazu.
FEW_RARE = 0.03

# A number is skewed, and gets a logarithm, if its right tail is this many times its left one.
_SKEWED = 4.0


def with_features(schema: Schema, features: Features, min_count: int | None = None) -> Schema:
    """The schema with the fields that `features` adds, before any row is read.

    `auto` adds the quantile bin of each number as an id, and hour of the day and weekday if the
    schema names a time and no part of it. `min_count`, unless given for all fields that leave it
    open, and `transform` may stay open until `settled` knows the training part. Raises a
    `SettingsError` if the name of an added field is taken.
    """
    numbers, ids = {}, dict(schema.ids)
    for name, field in schema.numbers.items():
        bins = field.bins
        if bins is None:
            bins = BINS if features == "auto" else 0
        if bins:
            bin = name + _BIN
            if bin in ids or bin in schema.numbers:
                raise SettingsError(
                    f"numbers.{name}: its bins would be the field {bin!r}, which the schema "
                    "already has; rename that one (with `column:`), or write "
                    f"numbers.{name}.bins: 0"
                )
            ids[bin] = Quantiles(column=field.column or name, buckets=bins)
        update: dict[str, Any] = {"bins": 0}
        if features == "paper" and field.transform is None:
            update["transform"] = ["minmax"]
        numbers[name] = field.model_copy(update=update)
    if min_count is None and features == "paper":
        min_count = 1
    if min_count is not None:
        ids = {name: _with_min_count(field, min_count) for name, field in ids.items()}
    has_parts = any(isinstance(field, TimePart) for field in ids.values())
    if features == "auto" and schema.time and not has_parts:
        for part in ("hour_of_day", "weekday"):
            if part not in ids and part not in schema.numbers:
                ids[part] = TimePart(encode=part)
    return schema.model_copy(update={"ids": ids, "numbers": numbers})


def settled(schema: Schema, rows: int, tails: dict[str, tuple[float, float, float]]) -> Schema:
    """The schema with everything that was open decided by the training part.

    It has `rows`; `tails` are minimum, maximum and mean of each number whose transform is open.
    """
    least = usual_min_count(rows)
    ids = {name: _with_min_count(field, least) for name, field in schema.ids.items()}
    numbers = dict(schema.numbers)
    for name, field in numbers.items():
        if field.transform is None:
            low, high, mean = tails[name]
            # log1p maps negative numbers to 0, so they must be small compared with the rest.
            is_skewed = mean > 0 and low > -mean and high - mean > _SKEWED * (mean - low)
            transform = ["log1p", "standard"] if is_skewed else ["standard"]
            numbers[name] = field.model_copy(update={"transform": transform})
    return schema.model_copy(update={"ids": ids, "numbers": numbers})


def usual_min_count(rows: int) -> int:
    """Of fields that leave it open, by the training rows."""
    return next(count for most, count in _MIN_COUNTS if rows < most)


def described(schema: Schema) -> str:
    """How a settled schema encodes ids and numbers, in one sentence."""
    parts = []
    counts = sorted({f.min_count for f in schema.ids.values() if isinstance(f, Vocabulary)})
    if counts and counts != [1]:
        least = " or ".join(f"{count:,}" for count in counts if count > 1)
        few = ", except in some fields" if 1 in counts else ""
        parts.append(f"ids seen fewer than {least} times share a row{few}")
    by_transform: dict[tuple[str, ...], list[str]] = {}
    for name, field in schema.numbers.items():
        by_transform.setdefault(tuple(field.transform or ()), []).append(name)
    for transform, names in by_transform.items():
        parts.append(f"{_shortened(names)} by {', '.join(transform) or 'no transform'}")
    bins = [name for name, field in schema.ids.items() if isinstance(field, Quantiles)]
    if bins:
        parts.append(f"quantile bins as ids: {_shortened(bins)}")
    times = [name for name, field in schema.ids.items() if isinstance(field, TimePart)]
    if times:
        parts.append(f"of the time: {', '.join(times)}")
    return "; ".join(parts) or "every id has a row"


def _shortened(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) < 4 else f"{names[0]}, {names[1]} .. {names[-1]}"


def _with_min_count(field: IdField, least: int) -> IdField:
    if not isinstance(field, Vocabulary) or field.min_count is not None:
        return field
    return field.model_copy(update={"min_count": least})
