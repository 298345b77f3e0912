"""From raw samples to rows of tables and numbers; see `load.py` beside it."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
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


formulas = sibling("formulas")

# Columns by name, samples one after the other, or a table: of polars, or of pandas.
Samples = Mapping[str, Sequence[Any]] | Iterable[Mapping[str, Any]] | pl.DataFrame | Any

_NO_ID = "write an id as text or as a whole number, None where it is missing"

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


class BadValues:
    """What happens to values that cannot be used.

    Args:
        policy: `error` refuses the first; `missing` takes them for missing values.

    Attributes:
        counts: values taken for missing ones so far, by column.

    Raises:
        ValueError: there is no such policy.
    """

    def __init__(self, policy: str) -> None:
        if policy not in ("error", "missing"):
            raise ValueError(f"on_bad_value: found {policy!r}; write 'error' or 'missing'")
        self.are_missing = policy == "missing"
        self.counts: dict[str, int] = {}

    def found(self, bad: pl.Series, values: pl.Series, column: str, remedy: str) -> None:
        """Take note of the values where `bad` holds, which the caller makes null.

        Raises:
            ValueError: bad values are errors, and there is one.
        """
        if not bad.any():
            return
        if not self.are_missing:
            raise ValueError(f"column {column}: found {values.filter(bad)[0]!r}; {remedy}")
        # A column of which several inputs are made counts once.
        self.counts[column] = max(self.counts.get(column, 0), int(bad.sum()))


class Encoder:
    """Turns raw samples into the model's inputs.

    Args:
        folder: of the package.
        about: its `package.json`; None: it is read.

    Attributes:
        columns: that the inputs are made of.
    """

    def __init__(self, folder: str | Path, about: Mapping[str, Any] | None = None) -> None:
        folder = Path(folder)
        if about is None:
            about = json.loads((folder / "package.json").read_text(encoding="utf-8"))
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

    def __call__(self, samples: Samples, bad_values: BadValues | None = None) -> Encoded:
        """The inputs of samples; a bad value is an error unless `bad_values` says otherwise.

        Raises:
            ValueError: a column is absent, or a value cannot be used.
        """
        bad_values = bad_values or BadValues("error")
        frame = self._frame(samples, self.columns, bad_values)
        found = [self._ids(field, frame, bad_values) for field in self._about["fields"]]
        wanted = self._about["numbers"]
        numbers = np.empty((len(frame), len(wanted)), dtype=np.float32)
        for i, number in enumerate(wanted):
            numbers[:, i] = _scaled(_numbers(frame, number["column"], bad_values), number)
        numbers = numbers.astype(self._about["numbers_dtype"]).astype(np.float32)
        # Polars' own memory must not be written, which torch warns of.
        ids = [np.require(ids, requirements="W") for ids, _ in found]
        return Encoded(ids, [lengths for _, lengths in found], numbers)

    def rows(
        self, samples: Samples, fields: Sequence[str], bad_values: BadValues | None = None
    ) -> dict[str, np.ndarray]:
        """Rows of some fields' tables, as a file of `stampede export --format onnx` takes them.

        Returns:
            By field `[n]` int64; `[n, most]` where samples may have several, -1 beyond the last.

        Raises:
            ValueError: there is no such field, a column is absent, or a value cannot be used.
        """
        bad_values = bad_values or BadValues("error")
        known = {field["name"]: field for field in self._about["fields"]}
        if other := [name for name in fields if name not in known]:
            raise ValueError(f"no field {other[0]!r}; the fields are {', '.join(known)}")
        columns = [known[name]["column"] or self._about["time"]["column"] for name in fields]
        frame = self._frame(samples, list(dict.fromkeys(columns)), bad_values)
        found = {}
        for name in fields:
            found[name], lengths = self._ids(known[name], frame, bad_values)
            if lengths is not None:
                padded = np.full((len(lengths), lengths.max(initial=0)), -1)
                padded[np.arange(padded.shape[1]) < lengths[:, None]] = found[name]
                found[name] = padded
        return found

    def _frame(self, samples: Samples, columns: list[str], bad_values: BadValues) -> pl.DataFrame:
        """Some columns, null where a value is missing."""
        frame = _table_of(samples, columns, self._id_columns, bad_values)
        return _missing_as_null(frame, self._about["missing"])

    def _ids(
        self, field: Mapping[str, Any], frame: pl.DataFrame, bad_values: BadValues
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """Rows of the field's table, and how many each sample has where it may have several."""
        encode, column = field["encode"], field["column"]
        if encode == "quantiles":
            numbers = _numbers(frame, column, bad_values)
            return formulas.bucket_rows(numbers, field["edges"]), None
        if encode in _PARTS_OF_TIME:
            return self._part_of_time(field, frame, bad_values), None
        if frame.schema[column] == pl.Null:
            frame = frame.with_columns(pl.col(column).cast(pl.String))
        kind = frame.schema[column]
        if isinstance(kind, pl.List | pl.Array) and not field["multi"]:
            raise ValueError(f"column {column}: found lists; write one id per sample")
        frame = frame.with_columns(self._without_fractions(field, frame[column], bad_values))
        kind = frame.schema[column]
        separator, most = field["separator"], field["max_ids"]
        texts = formulas.id_texts(column, kind, separator, most, self._about["missing"])
        cells = frame.select(texts).to_series()
        if encode not in ("vocabulary", "hash"):
            cells = _whole_numbers(cells, field, bad_values)
        lengths = None
        if field["multi"]:
            lengths, cells = formulas.flattened(cells)
        return self._rows_of(field, cells), lengths

    def _without_fractions(
        self, field: Mapping[str, Any], ids: pl.Series, bad_values: BadValues
    ) -> pl.Series:
        """Ids that are floats, as whole numbers are where some are missing, as whole numbers."""
        if isinstance(ids.dtype, pl.Array):
            ids = ids.arr.to_list()
        is_list = isinstance(ids.dtype, pl.List)
        if not (ids.dtype.inner if is_list else ids.dtype).is_float():
            return ids
        if field["encode"] == "vocabulary" and self._vocabularies[field["name"]].is_of_floats:
            return ids
        is_good, remedy = _is_whole, _NO_ID
        if field["encode"] == "hash":
            # In the log it may have been 1 or 1.0, which have different hashes.
            is_good, remedy = pl.Expr.is_null, "write ids as text, as they are in the log"
        ids = _good_alone(ids, is_good, field["column"], remedy, bad_values)
        return ids.cast(pl.List(pl.Int64) if is_list else pl.Int64)

    def _rows_of(self, field: Mapping[str, Any], texts: pl.Series) -> np.ndarray:
        """Row of each id; null is a missing one."""
        if field["encode"] == "vocabulary":
            rows = self._vocabularies[field["name"]].rows(texts)
        elif field["encode"] == "hash":
            rows = formulas.bucket(texts, field["buckets"], field["seed"])
        else:
            rows = texts.cast(pl.Int64).fill_null(0).to_numpy().copy()
        if texts.null_count():
            if field["missing_row"] is None:
                raise ValueError(f"field {field['name']}: an id is missing; write one")
            rows[texts.is_null().to_numpy()] = field["missing_row"]
        return rows

    def _part_of_time(
        self, field: Mapping[str, Any], frame: pl.DataFrame, bad_values: BadValues
    ) -> np.ndarray:
        column, format = self._about["time"]["column"], self._about["time"]["format"]
        seconds = formulas.seconds_of_time(column, frame.schema[column], format)
        found = frame.select(formulas.part_of_time(seconds, field["encode"])).to_series()
        bad_values.found(found.is_null(), frame[column], column, f"write a time as {format}")
        return found.cast(pl.Int64).fill_null(field["missing_row"]).to_numpy()


class _Vocabulary:
    """Rows of ids, found by a 64-bit hash; no two ids of the vocabulary have the same.

    An id that is not in it has the hash of one that is with a chance of size / 2^64.

    Attributes:
        is_of_floats: whether ids of the log were floats, as Parquet files may have them.
    """

    def __init__(self, path: Path, field: Mapping[str, Any]) -> None:
        # A small file can unpack to any number of values; the table bounds it by its own size.
        found = pl.scan_parquet(path, glob=False).select(pl.len()).collect().item()
        if found > field["rows"] - field["first_row"]:
            raise ValueError(
                f"{path.name}: {found:,} ids, but the table has {field['rows']:,} rows"
            )
        values = pl.read_parquet(path, glob=False).to_series()
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
    frame = frame.with_columns(pl.col(pl.Categorical, pl.Enum).cast(pl.String))
    if any(mark.lower() == "nan" for mark in missing):
        frame = frame.with_columns(pl.col(pl.Float32, pl.Float64).fill_nan(None))
    return frame.with_columns(pl.when(~text.is_in(missing)).then(text))


def _numbers(frame: pl.DataFrame, column: str, bad_values: BadValues) -> pl.Series:
    """Float64, null where missing."""
    given = frame.select(formulas.stripped(column, frame.schema[column])).to_series()
    found = given.cast(pl.Float64, strict=False)
    bad = given.is_not_null() & ~(found.abs() <= LARGEST).fill_null(False)
    remedy = "write a finite number, or None where it is missing"
    bad_values.found(bad, frame[column], column, remedy)
    return _without(found, bad)


def _scaled(values: pl.Series, number: Mapping[str, Any]) -> np.ndarray:
    """The network's input, `[n]` float32."""
    value = formulas.filled(pl.col("x"), number["fill"], number["transform"])
    seen = (number[name] for name in ("low", "high", "mean", "deviation"))
    scaled = formulas.scaled(value, number["transform"], *seen)
    return values.alias("x").to_frame().select(scaled).to_series().to_numpy()


def _whole_numbers(texts: pl.Series, field: Mapping[str, Any], bad_values: BadValues) -> pl.Series:
    """Ids that are rows already, as text or in lists of it."""
    size = field["size"]

    def is_row(value: pl.Expr) -> pl.Expr:
        return value.str.strip_chars().cast(pl.Int64, strict=False).is_between(0, size - 1)

    remedy = f"write whole numbers from 0 to {size - 1}"
    texts = _good_alone(texts, is_row, field["column"], remedy, bad_values)
    if isinstance(texts.dtype, pl.List):
        return texts.list.eval(pl.element().str.strip_chars())
    return texts.str.strip_chars()


def _is_whole(value: pl.Expr) -> pl.Expr:
    return (value % 1 == 0) & (value.abs() <= _LARGEST_WHOLE)


def _good_alone(
    ids: pl.Series,
    is_good: Callable[[pl.Expr], pl.Expr],
    column: str,
    remedy: str,
    bad_values: BadValues,
) -> pl.Series:
    """Ids, or lists of them, of which bad ones are null, or left out of their lists."""

    def is_bad(value: pl.Expr) -> pl.Expr:
        return value.is_not_null() & ~is_good(value).fill_null(False)

    is_list = isinstance(ids.dtype, pl.List)
    values = ids.explode() if is_list else ids
    bad = values.to_frame("id").select(is_bad(pl.col("id"))).to_series()
    bad_values.found(bad, values, column, remedy)
    if not bad.any():
        return ids
    if is_list:
        return ids.list.eval(pl.element().filter(~is_bad(pl.element())))
    return _without(ids, bad)


def _without(values: pl.Series, bad: pl.Series) -> pl.Series:
    """The values with null where they are bad."""
    return values.zip_with(~bad, pl.Series(values.name, [None], dtype=values.dtype))


def _table_of(
    samples: Samples, columns: list[str], id_columns: Set[str], bad_values: BadValues
) -> pl.DataFrame:
    """The wanted columns.

    Args:
        samples: raw ones.
        columns: that are wanted.
        id_columns: of these, the columns whose values are taken for text.
        bad_values: what happens to bad ones.

    Raises:
        ValueError: a column is absent, or a value is neither text nor number nor list.
    """
    if type(samples).__module__.partition(".")[0] == "pandas":
        samples = _of_pandas(samples, columns)
    if isinstance(samples, pl.DataFrame | Mapping):
        given = list(samples.columns if isinstance(samples, pl.DataFrame) else samples)
    else:
        samples = list(samples)
        if other := [sample for sample in samples if not isinstance(sample, Mapping)]:
            raise ValueError(
                f"found the sample {other[0]!r}; write a sample as values by column, or all "
                "samples as columns by name or as a table of polars or pandas"
            )
        given = [name for name in columns if all(name in sample for sample in samples)]
        samples = {name: [sample[name] for sample in samples] for name in given}
    absent = [name for name in columns if name not in given]
    if absent:
        raise ValueError(f"no column {absent[0]!r}; the model needs {', '.join(columns)}")
    series = [_series(name, samples[name], name in id_columns, bad_values) for name in columns]
    if len({len(column) for column in series}) > 1:
        sizes = ", ".join(f"{column.name} {len(column)}" for column in series)
        raise ValueError(f"columns of different lengths: {sizes}")
    return pl.DataFrame(series)


def _of_pandas(table: Any, columns: list[str]) -> dict[str, list[Any]]:
    """The wanted columns of a pandas table that are there; None where a value is missing."""
    return {
        name: table[name].astype(object).where(table[name].notna(), None).tolist()
        for name in columns
        if name in table.columns
    }


def _series(name: str, values: Any, is_id: bool, bad_values: BadValues) -> pl.Series:
    if isinstance(values, str):
        raise ValueError(f"column {name}: found {values!r}; write a list, of a value per sample")
    if isinstance(values, list | tuple):
        values = _alike(name, values, is_id, bad_values)
    try:
        found = pl.Series(name, values, strict=False)
    except (TypeError, pl.exceptions.PolarsError) as failure:
        raise ValueError(f"column {name}: {failure}; write text, numbers or lists") from None
    if found.dtype == pl.Object:
        raise ValueError(f"column {name}: found {found[0]!r}; write text, numbers or lists")
    return found


def _alike(name: str, values: Sequence[Any], is_id: bool, bad_values: BadValues) -> Sequence[Any]:
    """Values that polars does not make a common text of which nobody wrote."""
    kinds = set(map(type, values)) - {type(None)}
    lists = {kind for kind in kinds if issubclass(kind, list | tuple | np.ndarray | pl.Series)}
    if lists and kinds - lists:
        raise ValueError(
            f"column {name}: found lists beside single values; write lists in all samples, or in "
            "none"
        )
    if np.ndarray in lists:
        return [None if value is None else list(value) for value in values]
    if is_id and str in kinds and any(issubclass(kind, float | np.floating) for kind in kinds):
        floats = [value for value in values if isinstance(value, float | np.floating)]
        fractions = pl.Series(name, [value for value in floats if not value.is_integer()])
        bad_values.found(fractions.is_not_null(), fractions, name, _NO_ID)
        return [_whole(value) for value in values]
    return values


def _whole(value: Any) -> Any:
    """An id that is a float as a whole number; None where it is none."""
    if not isinstance(value, float | np.floating):
        return value
    return int(value) if value.is_integer() else None
