"""From raw samples to rows of tables and numbers; see `load.py` beside it."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import polars as pl

# Beyond it a number is infinite once it is a float32.
LARGEST = 3.4e38

# Up to it a float tells all whole numbers apart.
_LARGEST_WHOLE = 2.0**53


def sibling(name: str) -> ModuleType:
    """A file beside this one, wherever sys.path points."""
    path = Path(__file__).resolve().with_name(f"{name}.py")
    spec = importlib.util.spec_from_file_location(f"{__name__}_{name}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


formulas, hashing, raw_samples = sibling("formulas"), sibling("hashing"), sibling("samples")

_PARTS_OF_TIME = ("hour_of_day", "weekday")


class Encoded(NamedTuple):
    """Inputs of the model.

    Attributes:
        ids: of each field, rows of its table, sample after sample, int64.
        lengths: of each field, ids of each sample, `[n]` int64; None: one each.
        numbers: `[n, numbers]` float32.
    """

    ids: list[np.ndarray]
    lengths: list[np.ndarray | None]
    numbers: np.ndarray


class Encoder:
    """Turns raw samples into the model's inputs.

    Args:
        folder: of the package.
        about: its `package.json`.

    Attributes:
        columns: that the inputs are made of.
    """

    def __init__(self, folder: Path, about: Mapping[str, Any]) -> None:
        self._about = about
        self._vocabularies = {
            field["name"]: _Vocabulary(folder / "vocabularies" / f"{field['name']}.parquet", field)
            for field in about["fields"]
            if field["encode"] == "vocabulary"
        }
        inputs = [*about["fields"], *about["numbers"]]
        timed = [about["time"]["column"]] if about["time"] else []
        self._id_columns = {
            field["column"]
            for field in about["fields"]
            if field["encode"] not in ("quantiles", *_PARTS_OF_TIME)
        }
        self.columns = list(
            dict.fromkeys([column for field in inputs if (column := field["column"])] + timed)
        )

    def __call__(self, samples: raw_samples.Samples) -> Encoded:
        """The inputs of samples.

        Raises:
            ValueError: a column is absent, or a value cannot be used.
        """
        frame = raw_samples.table_of(samples, self.columns, self._id_columns)
        frame = _missing_as_null(frame, self._about["missing"])
        found = [self._ids(field, frame) for field in self._about["fields"]]
        wanted = self._about["numbers"]
        numbers = np.empty((len(frame), len(wanted)), dtype=np.float32)
        for i, number in enumerate(wanted):
            numbers[:, i] = _scaled(_numbers(frame, number["column"]), number)
        numbers = numbers.astype(self._about["numbers_dtype"]).astype(np.float32)
        # Polars' own memory must not be written, which torch warns of.
        ids = [np.require(ids, requirements="W") for ids, _ in found]
        return Encoded(ids, [lengths for _, lengths in found], numbers)

    def _ids(
        self, field: Mapping[str, Any], frame: pl.DataFrame
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """Rows of the field's table, and how many each sample has where it may have several."""
        encode, column = field["encode"], field["column"]
        if encode == "quantiles":
            return formulas.bucket_rows(_numbers(frame, column), field["edges"]), None
        if encode in _PARTS_OF_TIME:
            return self._part_of_time(encode, frame), None
        if frame.schema[column] == pl.Null:
            frame = frame.with_columns(pl.col(column).cast(pl.String))
        kind = frame.schema[column]
        if isinstance(kind, pl.List | pl.Array) and not field["multi"]:
            raise ValueError(f"column {column}: found lists; write one id per sample")
        frame = frame.with_columns(self._without_fractions(field, frame[column]))
        kind = frame.schema[column]
        texts = formulas.id_texts(column, kind, field["separator"], field["max_ids"])
        cells = frame.select(texts).to_series()
        lengths = None
        if field["multi"]:
            lengths, cells = formulas.flattened(cells)
        return self._rows_of(field, cells), lengths

    def _without_fractions(self, field: Mapping[str, Any], ids: pl.Series) -> pl.Series:
        """Ids that are floats, as whole numbers are where some are missing, as whole numbers."""
        if isinstance(ids.dtype, pl.Array):
            ids = ids.arr.to_list()
        is_list = isinstance(ids.dtype, pl.List)
        if not (ids.dtype.inner if is_list else ids.dtype).is_float():
            return ids
        if field["encode"] == "vocabulary" and self._vocabularies[field["name"]].is_of_floats:
            return ids
        values = ids.explode() if is_list else ids
        is_whole = (values % 1 == 0) & (values.abs() <= _LARGEST_WHOLE)
        bad, remedy = values.is_not_null() & ~is_whole.fill_null(False), raw_samples.NO_ID
        if field["encode"] == "hash":
            # In the log it may have been 1 or 1.0, which have different hashes.
            bad, remedy = values.is_not_null(), "write ids as text, as they are in the log"
        _refuse(bad, values, field["column"], remedy)
        return ids.cast(pl.List(pl.Int64) if is_list else pl.Int64)

    def _rows_of(self, field: Mapping[str, Any], texts: pl.Series) -> np.ndarray:
        """Row of each id; null is a missing one."""
        if field["encode"] == "vocabulary":
            rows = self._vocabularies[field["name"]].rows(texts)
        elif field["encode"] == "hash":
            rows = hashing.bucket(texts, field["buckets"], field["seed"])
        else:
            rows = _whole_numbers(texts, field)
        if texts.null_count():
            if field["missing_row"] is None:
                raise ValueError(f"field {field['name']}: an id is missing; write one")
            rows[texts.is_null().to_numpy()] = field["missing_row"]
        return rows

    def _part_of_time(self, part: str, frame: pl.DataFrame) -> np.ndarray:
        column, format = self._about["time"]["column"], self._about["time"]["format"]
        seconds = formulas.seconds_of_time(column, frame.schema[column], format)
        found = frame.select(formulas.part_of_time(seconds, part)).to_series()
        _refuse(found.is_null(), frame[column], column, f"write a time as {format}")
        return found.cast(pl.Int64).to_numpy()


class _Vocabulary:
    """Rows of ids, found by a 64-bit hash; no two ids of the vocabulary have the same.

    An id that is not in it has the hash of one that is with a chance of size / 2^64.

    Attributes:
        is_of_floats: whether ids of the log were floats, as Parquet files may have them.
    """

    def __init__(self, path: Path, field: Mapping[str, Any]) -> None:
        values = pl.read_parquet(path).to_series()
        self.is_of_floats = bool(values.str.contains(r"^-?\d+\.\d+(e-?\d+)?$").any())
        self._unseen_row, self._seed = field["unseen_row"], 0
        hashes = values.hash(self._seed).to_numpy()
        while len(np.unique(hashes)) < len(hashes):
            self._seed += 1
            hashes = values.hash(self._seed).to_numpy()
        order = np.argsort(hashes)
        self._hashes, self._rows = hashes[order], order + field["first_row"]

    def rows(self, ids: pl.Series) -> np.ndarray:
        """Row of each id, `[n]` int64; any where it is null."""
        # Sorted ones are found several times faster, and each only once.
        hashes, place = np.unique(ids.hash(self._seed).to_numpy(), return_inverse=True)
        rows = np.full(len(hashes), self._unseen_row, dtype=np.int64)
        if len(self._hashes):
            at = np.searchsorted(self._hashes, hashes).clip(max=len(self._hashes) - 1)
            rows = np.where(self._hashes[at] == hashes, self._rows[at], rows)
        return rows[place]


def _missing_as_null(frame: pl.DataFrame, missing: list[str]) -> pl.DataFrame:
    text = pl.col(pl.String)
    return frame.with_columns(pl.col(pl.Categorical, pl.Enum).cast(pl.String)).with_columns(
        pl.when(~text.is_in(missing)).then(text)
    )


def _numbers(frame: pl.DataFrame, column: str) -> pl.Series:
    """Float64, null where missing."""
    given = frame.select(formulas.stripped(column, frame.schema[column])).to_series()
    found = given.cast(pl.Float64, strict=False)
    bad = given.is_not_null() & ~(found.abs() <= LARGEST).fill_null(False)
    _refuse(bad, frame[column], column, "write a finite number, or None where it is missing")
    return found


def _scaled(values: pl.Series, number: Mapping[str, Any]) -> np.ndarray:
    """The network's input, `[n]` float32."""
    value = formulas.filled(pl.col("x"), number["fill"], number["transform"])
    seen = (number[name] for name in ("low", "high", "mean", "deviation"))
    scaled = formulas.scaled(value, number["transform"], *seen)
    return values.alias("x").to_frame().select(scaled).to_series().to_numpy()


def _whole_numbers(texts: pl.Series, field: Mapping[str, Any]) -> np.ndarray:
    """Ids that are rows; 0 where missing."""
    found = texts.str.strip_chars().cast(pl.Int64, strict=False)
    size = field["size"]
    bad = texts.is_not_null() & ~found.is_between(0, size - 1).fill_null(False)
    _refuse(bad, texts, field["column"], f"write whole numbers from 0 to {size - 1}")
    return found.fill_null(0).to_numpy().copy()


def _refuse(bad: pl.Series, values: pl.Series, column: str, remedy: str) -> None:
    if bad.any():
        raise ValueError(f"column {column}: found {values.filter(bad)[0]!r}; {remedy}")
