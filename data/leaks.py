"""Columns that tell so much of the clicks that they may be known only after them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import polars as pl

from stampede.data.prepared.manifest import TEST, TRAIN
from stampede.settings import cut

# Rows at the mean click rate that smooth the rate of a value.
_PRIOR = 20
# A column leaks the label if its AUC alone, less two standard errors, is this high; or lower, if it
# is so far above all others and has few values. Of many, such as the items of a log whose negatives
# were drawn at random, some are just popular.
_LEAK, _LOW_LEAK, _FAR_ABOVE, _FEW_VALUES = 0.95, 0.8, 0.15, 100
# Or if, where it has another value than in most rows, nearly all of so many rows are clicks, and
# that by so many standard errors more than of all rows.
_NEARLY_ALL, _FEWEST, _ERRORS = 0.99, 50, 6

_REMEDY = "known only after the click; leave it out unless it is known before"


class Alone(NamedTuple):
    """What a column's values say of the clicks, without other columns.

    Attributes:
        auc: on another part, of the click rates that the values have in the training part; None if
            it is undefined.
        error: its standard error.
        values: how many different ones there are, a missing one included.
        others, clicked: rows with another value than the most frequent one, and clicks among them,
            if nearly all are, and that by no chance; else 0. Otherwise a value is missing, say.
    """

    auc: float | None
    error: float
    values: int
    others: int
    clicked: int


def counts_by_value(values: pl.LazyFrame, value: str, part: str, label: str) -> pl.DataFrame:
    """Each value once, null included, and its rows, those with a label, and its clicks.

    They are of all parts, `train` and `test`: `rows`, `known` and `clicks`, `train`, `train_known`,
    and so on.

    Args:
        values: with a column of values, one of parts as in `PARTS`, and one of labels.
    """
    parts = {"": pl.col(part) >= 0, "train": pl.col(part) == TRAIN, "test": pl.col(part) == TEST}
    kinds = {"known": pl.col(label).is_not_null(), "clicks": pl.col(label) >= 0.5}
    sums = {name or "rows": rows for name, rows in parts.items()}
    for kind, of_kind in kinds.items():
        sums |= {f"{name}_{kind}".strip("_"): rows & of_kind for name, rows in parts.items()}
    counts = {name: rows.sum().cast(pl.Int64) for name, rows in sums.items()}
    return values.group_by(value).agg(**counts).collect(engine="streaming")


def alone(counts: pl.DataFrame) -> Alone:
    """What the values of `counts_by_value` say."""
    clicks, others = counts["test_clicks"], counts["test_known"] - counts["test_clicks"]
    train = counts["train_known"]
    if not (train.sum() and clicks.sum() and others.sum()):
        return Alone(None, 0.0, len(counts), *_with_another_value(counts))
    prior = _PRIOR * counts["train_clicks"].sum() / train.sum()
    rate = (counts["train_clicks"] + prior) / (train + _PRIOR)
    of_rates = pl.DataFrame({"rate": rate, "clicks": clicks, "others": others})
    by_rate = of_rates.group_by("rate").agg(pl.col("clicks", "others").sum()).sort("rate")
    # Pairs of a click and another row; those of one rate count half.
    below = by_rate["others"].cum_sum() - by_rate["others"] / 2
    auc = float((by_rate["clicks"] * below).sum() / (clicks.sum() * others.sum()))
    error = error_of_auc(auc, int(clicks.sum()), int(others.sum()))
    return Alone(auc, error, len(counts), *_with_another_value(counts))


def _with_another_value(counts: pl.DataFrame) -> tuple[int, int]:
    """See `Alone`."""
    rows, clicks = int(counts["known"].sum()), int(counts["clicks"].sum())
    if not 0 < clicks < rows:
        return 0, 0
    usual = counts.row(counts["rows"].arg_max(), named=True)
    others, clicked = rows - usual["known"], clicks - usual["clicks"]
    share = clicks / rows
    errors = (clicked - others * share) / math.sqrt(max(others, 1) * share * (1 - share))
    is_told = others >= _FEWEST and clicked >= _NEARLY_ALL * others and errors >= _ERRORS
    return (others, clicked) if is_told else (0, 0)


def error_of_auc(auc: float, clicks: int, others: int) -> float:
    """Standard error of an AUC, at least that of one pair less (Hanley and McNeil 1982, eq. 2)."""
    auc = min(max(auc, 0.5), 1 - 0.5 / min(clicks, others))
    of_clicks, of_others = auc / (2 - auc), 2 * auc**2 / (1 + auc)
    variance = auc * (1 - auc)
    variance += (clicks - 1) * (of_clicks - auc**2) + (others - 1) * (of_others - auc**2)
    return math.sqrt(variance / (clicks * others))


def leak_sentences(columns: Sequence[tuple[str, Alone]], part: str, goal: str = "") -> list[str]:
    """What to say of columns that seem to be known only after the click.

    Args:
        columns: with their names.
        part: on which the AUC was measured.
        goal: whose clicks they are, of several.
    """
    by_auc, by_clicks = [], []
    aucs = [found.auc for _, found in columns]
    for place, (name, found) in enumerate(columns):
        others = [auc for auc in (*aucs[:place], *aucs[place + 1 :]) if auc is not None]
        least = 0.0 if found.auc is None else found.auc - 2 * found.error
        limit = _LEAK
        if others and found.values <= _FEW_VALUES:
            limit = min(_LEAK, max(_LOW_LEAK, max(others) + _FAR_ABOVE))
        if least >= limit:
            by_auc.append(f"{name} {found.auc:.3f} (+- {found.error:.3f})")
        elif found.others:
            by_clicks.append(f"{name} ({found.clicked:,} of {found.others:,})")
    of_goal = f" of the goal {goal!r}" if goal else ""
    sentences = []
    if by_auc:
        says = f"this {part} AUC{of_goal} alone suggests that the value is {_REMEDY}"
        sentences.append(f"{cut(', '.join(by_auc))}: {says}")
    if by_clicks:
        says = f"rows with another value than the most frequent one are clicks{of_goal}, so the "
        sentences.append(f"{cut(', '.join(by_clicks))}: {says}value seems {_REMEDY}")
    return sentences
