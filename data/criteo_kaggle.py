"""Preparation of Criteo's click log in its original layout."""

from __future__ import annotations

import gzip
import os
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import polars as pl
import pyarrow
import pyarrow.csv

from stampede.data.errors import DataError
from stampede.data.prepared.old import PartSizes, PreparedArrays

LABEL = "label"
NUMBERS = tuple(f"I{i}" for i in range(1, 14))
FIELDS = tuple(f"C{i}" for i in range(1, 27))
COLUMNS = (LABEL, *NUMBERS, *FIELDS)

# The sequential split of the paper: seven days, the last one held out.
SEQUENTIAL_TEST = 1 / 7
RANDOM_TEST = 1 / 10

UNSEEN_ID = 0
MISSING_ID = "-1"


@dataclass(frozen=True)
class CriteoSplit:
    """How the rows of a log are divided.

    Attributes:
        split: `sequential`, the last 1/7 of the rows are the test part; `random`, 10 %, by seed.
        seed: seed of the random split.
        validation_fraction: share of the training rows, from their end, kept for validation.
    """

    split: Literal["sequential", "random"] = "sequential"
    seed: int = 0
    validation_fraction: float = 0.1

    def order(self, rows: int) -> tuple[np.ndarray, PartSizes]:
        """File rows in the order training, validation, test, and the size of each part."""
        order = np.arange(rows)
        if self.split == "sequential":
            trained = int((1 - SEQUENTIAL_TEST) * rows)
        else:
            trained = rows - int(RANDOM_TEST * rows)
            shuffled = np.random.default_rng(self.seed).permutation(rows)
            order = np.concatenate([np.sort(shuffled[:trained]), np.sort(shuffled[trained:])])
        validation = int(self.validation_fraction * trained)
        return order, PartSizes(trained - validation, validation, rows - trained)


def prepare(path: Path, split: CriteoSplit) -> PreparedArrays:
    """Read a log and turn it into arrays; everything learned comes from the training part.

    Numbers: missing is 0, then min-max scaled by the training part's range and clipped to [0, 1].
    Ids: each field's training values get the rows 1, 2, ... in order of appearance, a missing one
    among them; row 0 is shared by all values that the training part lacks.

    Args:
        path: tab-separated label, I1-I13, C1-C26, without header, plain or gzip.
        split: the division into parts.

    Raises:
        DataError: the file is absent, damaged, or a line of it is not as described.
    """
    log = _read(path)
    if len(log) < 10:
        raise DataError(f"{path}: {len(log)} rows are too few to divide into parts; need 10")
    order, sizes = split.order(len(log))
    log = log[order]
    training = log[: sizes.train]

    dense = np.empty((len(log), len(NUMBERS)), dtype=np.float32)
    for i, name in enumerate(NUMBERS):
        values = log[name].fill_null(0.0).to_numpy()
        low, high = values[: sizes.train].min(), values[: sizes.train].max()
        width = high - low if high > low else 1.0
        dense[:, i] = np.clip((values - low) / width, 0.0, 1.0)

    ids = np.empty((len(log), len(FIELDS)), dtype=np.int32)
    vocabulary_sizes = {}
    for i, name in enumerate(FIELDS):
        seen = training[name].fill_null(MISSING_ID).unique(maintain_order=True)
        rows = pl.int_range(1, len(seen) + 1, dtype=pl.Int32, eager=True)
        values = log[name].fill_null(MISSING_ID)
        ids[:, i] = values.replace_strict(
            seen, rows, default=UNSEEN_ID, return_dtype=pl.Int32
        ).to_numpy()
        vocabulary_sizes[name] = len(seen) + 1
    return PreparedArrays(
        ids=ids,
        dense=dense,
        label=log[LABEL].to_numpy().astype(np.uint8),
        vocabulary_sizes=vocabulary_sizes,
        parts=sizes,
    )


def _read(path: Path) -> pl.DataFrame:
    """The whole log: label Int8, numbers Float64, ids String; null where missing."""
    try:
        table = _parse(path, threads=True)
    except (pyarrow.ArrowInvalid, OSError) as failure:
        if getattr(failure, "errno", None):  # the file itself: absent, a folder, not readable
            raise DataError(f"{path}: {os.strerror(failure.errno)}") from None
        _check_gzip(path)
        raise DataError(_explain(path, failure)) from None
    log = pl.from_arrow(table)
    wrong = (~log[LABEL].is_in([0, 1])) | log[LABEL].is_null()
    if wrong.any():
        line = int(wrong.arg_max())
        raise DataError(
            f"{path}: line {line + 1}, column label: found {log[LABEL][line]!r}; write 0 or 1"
        )
    for name in NUMBERS:
        wrong = ~log[name].is_finite().fill_null(True)
        if wrong.any():
            line = int(wrong.arg_max())
            raise DataError(
                f"{path}: line {line + 1}, column {name}: found {log[name][line]}; "
                "write a finite number, or nothing where it is missing"
            )
    return log


def _parse(path: Path, threads: bool) -> pyarrow.Table:
    types = {LABEL: pyarrow.int8()}
    types.update(dict.fromkeys(NUMBERS, pyarrow.float64()))
    types.update(dict.fromkeys(FIELDS, pyarrow.string()))
    return pyarrow.csv.read_csv(
        path,
        pyarrow.csv.ReadOptions(column_names=list(COLUMNS), use_threads=threads),
        pyarrow.csv.ParseOptions(delimiter="\t", quote_char=False, ignore_empty_lines=False),
        pyarrow.csv.ConvertOptions(column_types=types, null_values=[""], strings_can_be_null=True),
    )


def _explain(path: Path, failure: Exception) -> str:
    """Say which line is wrong: only the reader without threads knows its number."""
    try:
        _parse(path, threads=False)
    except (pyarrow.ArrowInvalid, OSError) as again:
        failure = again
    reason = str(failure).splitlines()[0][:300]
    for number, name in enumerate(COLUMNS):
        reason = reason.replace(f"In CSV column #{number}: ", f"column {name}: ")
    reason = reason.replace("Row #", "line ")
    return (
        f"{path}: {reason}. Every line must hold 40 tab-separated columns: label, 13 numbers, "
        "26 ids; an empty column is a missing value"
    )


def _check_gzip(path: Path) -> None:
    """Raise DataError if a gzip file is damaged."""
    if path.suffix != ".gz":
        return
    try:
        with gzip.open(path) as file:
            while file.read(1 << 24):
                pass
    except (EOFError, OSError, zlib.error) as failure:
        raise DataError(
            f"{path}: damaged or truncated gzip file ({failure}); copy or download it again"
        ) from None
