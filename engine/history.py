"""The course of a run as a data frame."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any

import pandas as pd

# Of a line, not of a part.
_PLACE = ("kind", "part", "step", "train_seconds", "samples")


def history(lines: Sequence[dict[str, Any]]) -> pd.DataFrame:
    """A row for each evaluation, in order.

    Its columns: `epoch`, the one it was made in or at the end of, counted from 1; `step`;
    `train_seconds`, spent in training until then; `train_loss`, mean of the losses that were logged
    since the evaluation before; then every metric of each part, such as `validation_auc` and
    `test_logloss`. What is not known is NaN.

    Args:
        lines: of `metrics.jsonl`.
    """
    rows: dict[int, dict[str, Any]] = {}
    epoch, losses = 1, []
    for line in lines:
        if line["kind"] == "train":
            epoch = line["epoch"]
            if line["loss"] is not None:
                losses.append(line["loss"])
        elif line["kind"] == "evaluation":
            # The parts of one evaluation share a row.
            row = rows.get(line["step"])
            if row is None:
                loss, losses = fmean(losses) if losses else None, []
                row = rows[line["step"]] = {
                    "epoch": epoch,
                    "step": line["step"],
                    "train_seconds": line.get("train_seconds"),
                    "train_loss": loss,
                }
            row |= {
                f"{line['part']}_{name}": value
                for name, value in line.items()
                if name not in _PLACE and not isinstance(value, list)
            }
    columns = ["epoch", "step", "train_seconds", "train_loss"]
    return pd.DataFrame(list(rows.values()), columns=None if rows else columns)
