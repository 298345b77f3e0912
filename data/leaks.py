"""Columns that tell so much of the clicks that they may be known only after them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np
import polars as pl
import torch

from stampede.data.prepared.manifest import TEST, TRAIN
from stampede.data.samples import Dataset, Part, by_goal, sampled_rows

# Rows at the mean click rate that smooth the rate of a value.
_PRIOR = 20
# A column leaks the label if its AUC alone, less two standard errors, is this high; or lower, if it
# is so far above all others and has few values. Of many, such as the items of a log whose negatives
# were drawn at random, some are just popular.
_LEAK, _LOW_LEAK, _FAR_ABOVE, _FEW_VALUES = 0.95, 0.8, 0.15, 100
# Or if only clicks have another value than most rows, in so many rows that it is no chance.
_FEWEST_CLICKS, _CHANCE = 50, 1e-9

_REMEDY = "known only after the click; leave it out unless it is known before"


class Alone(NamedTuple):
    """What a column's values say of the clicks, without other columns.

    Attributes:
        auc: on another part, of the click rates that the values have in the training part; None if
            it is undefined.
        error: its standard error.
        values: how many different ones there are, a missing one included.
        only_clicks: rows with another value than the most frequent one, if each of them is a click
            and that is no chance; else 0. A value is missing in the rows without a click, say.
    """

    auc: float | None
    error: float
    values: int
    only_clicks: int


def counts_by_value(values: pl.LazyFrame, value: str, part: str, label: str) -> pl.DataFrame:
    """Each value once, null included, and its rows and clicks: of all parts, `train` and `test`.

    Args:
        values: with a column of values, one of parts as in `sources.PARTS`, and one of labels.
    """
    parts = {"": pl.col(part) >= 0, "train": pl.col(part) == TRAIN, "test": pl.col(part) == TEST}
    sums = {part or "rows": rows for part, rows in parts.items()}
    clicks = {f"{part}_clicks".strip("_"): rows for part, rows in parts.items()}
    sums |= {name: rows & (pl.col(label) >= 0.5) for name, rows in clicks.items()}
    counts = {name: rows.sum().cast(pl.Int64) for name, rows in sums.items()}
    return values.group_by(value).agg(**counts).collect(engine="streaming")


def alone(counts: pl.DataFrame) -> Alone:
    """What the values of `counts_by_value` say."""
    clicks, others = counts["test_clicks"], counts["test"] - counts["test_clicks"]
    if not (counts["train"].sum() and clicks.sum() and others.sum()):
        return Alone(None, 0.0, len(counts), _only_clicks(counts))
    prior = _PRIOR * counts["train_clicks"].sum() / counts["train"].sum()
    rate = (counts["train_clicks"] + prior) / (counts["train"] + _PRIOR)
    of_rates = pl.DataFrame({"rate": rate, "clicks": clicks, "others": others})
    by_rate = of_rates.group_by("rate").agg(pl.col("clicks", "others").sum()).sort("rate")
    # Pairs of a click and another row; those of one rate count half.
    below = by_rate["others"].cum_sum() - by_rate["others"] / 2
    auc = float((by_rate["clicks"] * below).sum() / (clicks.sum() * others.sum()))
    error = error_of_auc(auc, int(clicks.sum()), int(others.sum()))
    return Alone(auc, error, len(counts), _only_clicks(counts))


def _only_clicks(counts: pl.DataFrame) -> int:
    """See `Alone`."""
    rows, clicks = int(counts["rows"].sum()), int(counts["clicks"].sum())
    if not 0 < clicks < rows:
        return 0
    usual = counts.row(counts["rows"].arg_max(), named=True)
    others = rows - usual["rows"]
    if others < _FEWEST_CLICKS or others > clicks - usual["clicks"]:
        return 0
    return others if math.exp(others * math.log(clicks / rows)) < _CHANCE else 0


def error_of_auc(auc: float, clicks: int, others: int) -> float:
    """Standard error of an AUC, at least that of one pair less (Hanley and McNeil 1982, eq. 2)."""
    auc = min(max(auc, 0.5), 1 - 0.5 / min(clicks, others))
    of_clicks, of_others = auc / (2 - auc), 2 * auc**2 / (1 + auc)
    variance = auc * (1 - auc)
    variance += (clicks - 1) * (of_clicks - auc**2) + (others - 1) * (of_others - auc**2)
    return math.sqrt(variance / (clicks * others))


def leak_sentences(columns: Mapping[str, Alone], part: str) -> list[str]:
    """What to say of columns that seem to be known only after the click.

    Args:
        columns: by name.
        part: on which the AUC was measured.
    """
    by_auc, by_clicks = [], []
    for name, found in columns.items():
        others = [one.auc for other, one in columns.items() if other != name]
        highest = max((auc for auc in others if auc is not None), default=math.inf)
        least = 0.0 if found.auc is None else found.auc - 2 * found.error
        low = _LEAK if found.values > _FEW_VALUES else max(_LOW_LEAK, highest + _FAR_ABOVE)
        if least >= min(_LEAK, low):
            by_auc.append(f"{name} {found.auc:.3f} (+- {found.error:.3f})")
        elif found.only_clicks:
            by_clicks.append(f"{name} ({found.only_clicks:,} rows)")
    sentences = []
    if by_auc:
        says = f"this {part} AUC alone suggests that the value is {_REMEDY}"
        sentences.append(f"{', '.join(by_auc)}: {says}")
    if by_clicks:
        says = "each row with another value than the most frequent one is a click, so the value "
        sentences.append(f"{', '.join(by_clicks)}: {says}seems {_REMEDY}")
    return sentences


def leaks(dataset: Dataset) -> list[str]:
    """`leak_sentences` of a prepared data set's id fields, by a sample of the rows.

    Numbers are seen by their bins, which are id fields. Clicks are those of the first goal.
    """
    other = dataset.validation or dataset.test
    frames = _frames(dataset.train, TRAIN), _frames(other, TEST)
    columns = {}
    for name, *of_parts in zip(dataset.vocabulary_sizes, *frames, strict=True):
        counts = counts_by_value(pl.concat(of_parts).lazy(), "value", "part", "label")
        columns[name] = alone(counts)
    return leak_sentences(columns, "validation" if dataset.validation else "test")


def _frames(part: Part, number: int) -> Iterator[pl.DataFrame]:
    """For each field, the ids of sampled rows with their labels; -1 where a row has none."""
    samples = part.read(torch.from_numpy(sampled_rows(part.rows)))
    label = by_goal(samples.label)[0].numpy()
    rows = np.arange(len(label))

    def frame(values: np.ndarray, of: np.ndarray) -> pl.DataFrame:
        found = pl.DataFrame({"value": values, "label": label[of]})
        return found.filter(pl.col("label").is_not_nan()).with_columns(part=number)

    for column in samples.ids.T.numpy():
        yield frame(column, rows)
    for bag in samples.bags:
        lengths, values = bag.lengths.numpy(), bag.values.numpy()
        empty = rows[lengths == 0]
        none = np.full_like(values, -1, shape=len(empty))
        yield frame(np.concatenate([values, none]), np.concatenate([rows.repeat(lengths), empty]))
