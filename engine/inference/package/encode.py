"""Turns raw samples into rows of tables and numbers; see `load.py` beside it."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import polars as pl

# The `formulas.py` beside this file, whatever sys.path says.
_path = Path(__file__).resolve().with_name("formulas.py")
_spec = importlib.util.spec_from_file_location(f"{__name__}_formulas", _path)
formulas = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(formulas)

# Columns by name, a sequence of samples, or a polars or pandas table.
Samples = Mapping[str, Sequence[Any]] | Iterable[Mapping[str, Any]] | pl.DataFrame | Any

_TOO_COARSE = "a float cannot tell ids of this size apart; write it as a whole number or as text"


class Encoded(NamedTuple):
    """Inputs of the model.

    Attributes:
        ids: for each field, int64 rows of its table, sample after sample.
        lengths: for each field, `[n]` int64 numbers of ids per sample; None: one each.
        numbers: `[n, numbers]` float32.
        weights: for each field, float32 weights of its ids; None: all are 1.
    """

    ids: list[np.ndarray]
    lengths: list[np.ndarray | None]
    numbers: np.ndarray
    weights: list[np.ndarray | None]


class BadValues:
    """Refuses the first value that cannot be used (policy `error`), or counts them by column.

    With the policy `missing`, they are treated as missing.
    """

    def __init__(self, policy: str) -> None:
        if policy not in ("error", "missing"):
            raise ValueError(f"on_bad_value: found {policy!r}; write 'error' or 'missing'")
        self.are_missing = policy == "missing"
        self.counts: dict[str, int] = {}

    def without(self, given: pl.DataFrame, frame: pl.DataFrame, typed: Any) -> pl.Series:
        """The values of an input, see `formulas.Typed`, after a count or refusal of bad ones.

        Args:
            given: the samples, for the message.
            frame: the same with each id in one form.
        """
        if typed.is_bad is None:
            return frame.select(typed.values).to_series()
        columns = frame.select(values=typed.values, bad=typed.is_bad.fill_null(False))
        values, bad = columns.get_columns()
        column = typed.column
        if bad.any() and not self.are_missing:
            first = given.filter(bad).row(0, named=True)
            remedy = typed.remedy_of(first[column], first[typed.beside or column])
            raise ValueError(
                f"column {column}: found {first[column]!r}; {remedy} "
                '(or on_bad_value="missing" to treat it as missing)'
            )
        if bad.any():
            # A column used by several inputs counts once.
            self.counts[column] = max(self.counts.get(column, 0), int(bad.sum()))
        return values


class Encoder:
    """Turns raw samples into the inputs of the model of a package.

    Attributes:
        columns: the columns that the inputs are made from.
    """

    def __init__(self, folder: str | Path, about: Mapping[str, Any] | None = None) -> None:
        folder = Path(folder)
        if about is None:
            about = json.loads((folder / "package.json").read_text(encoding="utf-8"))
        self._about = about
        self._vocabularies = {
            field["name"]: _Vocabulary(folder / "vocabularies" / f"{field['name']}.parquet", field)
            for field in about["fields"]
            if field["encode"] == "vocabulary" and not field.get("table")
        }
        used = [one["column"] for one in (*about["fields"], *about["numbers"]) if one["column"]]
        used += [field["weights"] for field in about["fields"] if field.get("weights")]
        timed = [about["time"]["column"]] if about["time"] else []
        self.columns = list(dict.fromkeys(used + timed))

    def __call__(self, samples: Samples, bad_values: BadValues | None = None) -> Encoded:
        """Encode samples; raises a ValueError if a column is absent, or a value cannot be used."""
        bad_values = bad_values or BadValues("error")
        frame = self._frame(samples, self.columns)
        found = [self._ids(field, frame, bad_values) for field in self._about["fields"]]
        wanted = self._about["numbers"]
        numbers = np.empty((len(frame), len(wanted)), dtype=np.float32)
        for i, number in enumerate(wanted):
            values = self._number(number["column"], frame, bad_values)
            numbers[:, i] = _scaled(values, number)
        numbers = numbers.astype(self._about["numbers_dtype"]).astype(np.float32)
        # Polars' memory is read-only, which torch warns about.
        ids = [np.require(ids, requirements="W") for ids, _ in found]
        lengths = [lengths for _, lengths in found]
        weights = [
            None if not field.get("weights") else self._weights(field, frame, of_field, bad_values)
            for field, of_field in zip(self._about["fields"], lengths, strict=True)
        ]
        return Encoded(ids, lengths, numbers, weights)

    def rows(
        self, samples: Samples, fields: Sequence[str], bad_values: BadValues | None = None
    ) -> dict[str, np.ndarray]:
        """Rows of some fields' tables, as inputs of a `stampede export --format onnx` file.

        Returns:
            By field, `[n]` int64; `[n, most]` for fields with several ids, padded with -1.

        Raises:
            ValueError: there is no such field, a column is absent, or a value cannot be used.
        """
        bad_values = bad_values or BadValues("error")
        known = {field["name"]: field for field in self._about["fields"]}
        if other := [name for name in fields if name not in known]:
            raise ValueError(f"no field {other[0]!r}; the fields are {', '.join(known)}")
        columns = [known[name]["column"] or self._about["time"]["column"] for name in fields]
        frame = self._frame(samples, list(dict.fromkeys(columns)))
        found = {}
        for name in fields:
            found[name], lengths = self._ids(known[name], frame, bad_values)
            if lengths is not None:
                padded = np.full((len(lengths), lengths.max(initial=0)), -1)
                padded[np.arange(padded.shape[1]) < lengths[:, None]] = found[name]
                found[name] = padded
        return found

    def _frame(self, samples: Samples, columns: list[str]) -> pl.DataFrame:
        """Some columns, null where a value is missing."""
        frame = _table_of(samples, columns)
        frame = frame.with_columns(pl.col(pl.Categorical, pl.Enum).cast(pl.String))
        quantiles = (one for one in self._about["fields"] if one["encode"] == "quantiles")
        numeric = {one["column"] for one in (*self._about["numbers"], *quantiles)}
        changed = []
        for column in frame:
            is_number = column.name in numeric
            is_mark = formulas.marked(column, self._about["missing"], is_number)
            if is_mark is not None:
                value = pl.when(~is_mark).then(pl.col(column.name))
                changed.append(value.alias(column.name))
        return frame.with_columns(changed)

    def _number(self, column: str, frame: pl.DataFrame, bad_values: BadValues) -> pl.Series:
        """Float64, null where missing."""
        typed = formulas.typed_number(column, frame.schema[column])
        return bad_values.without(frame, frame, typed)

    def _ids(
        self, field: Mapping[str, Any], frame: pl.DataFrame, bad_values: BadValues
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """Rows of the field's table; for fields with several ids, also their number per sample."""
        encode, column = field["encode"], field["column"]
        if encode == "quantiles":
            numbers = self._number(column, frame, bad_values)
            return formulas.bucket_rows(numbers, field["edges"]), None
        if encode in ("hour_of_day", "weekday"):
            column, format = self._about["time"]["column"], self._about["time"]["format"]
            typed = formulas.typed_time(column, frame.schema[column], format)
            seconds = bad_values.without(frame, frame, typed).to_frame("time")
            part = seconds.select(formulas.part_of_time(pl.col("time"), encode)).to_series()
            return part.cast(pl.Int64).fill_null(field["missing_row"]).to_numpy(), None
        if isinstance(frame.schema[column], pl.List | pl.Array) and not field["multi"]:
            raise ValueError(f"column {column}: found lists; write one id per sample")
        alike = self._alike(column, frame)
        typed = formulas.typed_ids(self._described(field), alike.schema[column])
        cells = bad_values.without(frame, alike, typed)
        if not field["multi"]:
            return self._rows_of(field, cells), None
        lengths, cells = formulas.flattened(cells, field.get("query") is None)
        return self._rows_of(field, cells), lengths

    def _weights(
        self,
        field: Mapping[str, Any],
        frame: pl.DataFrame,
        lengths: np.ndarray,
        bad_values: BadValues,
    ) -> np.ndarray:
        """Weights of a field's ids, float32."""
        column, ids = field["weights"], self._described(field)
        alike = self._alike(ids.column, frame)
        kinds = alike.schema
        typed = formulas.typed_weights(column, kinds[column], ids, kinds[ids.column])
        return formulas.flattened_weights(bad_values.without(frame, alike, typed), lengths)

    def _described(self, field: Mapping[str, Any]) -> Any:
        """How the field's ids stand in their column."""
        is_text = field["encode"] in ("vocabulary", "hash")
        return formulas.Ids(
            column=field["column"],
            separator=field["separator"],
            missing=self._about["missing"],
            max_ids=field["max_ids"],
            keep=field["keep"],
            size=None if is_text else field["size"],
        )

    def _alike(self, column: str, frame: pl.DataFrame) -> pl.DataFrame:
        """The samples with each id of a column in one form, whatever its type."""
        ids = frame[column]
        cells = ids.explode() if isinstance(ids.dtype, pl.List | pl.Array) else ids
        coarse = formulas.too_coarse(cells)
        if coarse.any():
            raise ValueError(f"column {column}: found {cells.filter(coarse)[0]!r}; {_TOO_COARSE}")
        return frame.with_columns(formulas.written_alike(ids)[0])

    def _rows_of(self, field: Mapping[str, Any], texts: pl.Series) -> np.ndarray:
        """Row of each id; null means missing."""
        if field["encode"] == "vocabulary":
            # Perhaps that of the field whose table it uses.
            rows = self._vocabularies[field.get("table") or field["name"]].rows(texts)
        elif field["encode"] == "hash":
            rows = formulas.bucket(texts, field["buckets"], field["seed"])
        else:
            rows = texts.cast(pl.Int64).fill_null(0).to_numpy().copy()
        if texts.null_count():
            if field["missing_row"] is None:
                raise ValueError(f"field {field['name']}: an id is missing; write one")
            rows[texts.is_null().to_numpy()] = field["missing_row"]
        return rows


class _Vocabulary:
    """Finds rows of ids by a 64-bit hash, which is unique within the vocabulary.

    An unknown id collides with a known one with probability size / 2^64.
    """

    def __init__(self, path: Path, field: Mapping[str, Any]) -> None:
        values = pl.read_parquet(path, glob=False).to_series()
        self._unseen_row, self._seed = field["unseen_row"], 0
        while values.hash(self._seed).n_unique() < len(values):
            self._seed += 1
        hashes = values.hash(self._seed).to_numpy()
        order = np.argsort(hashes)
        self._hashes, self._rows = hashes[order], order + field["first_row"]

    def rows(self, ids: pl.Series) -> np.ndarray:
        """Row of each id, `[n]` int64; undefined for null."""
        # Sorted unique hashes are found several times faster.
        hashes, place = np.unique(ids.hash(self._seed).to_numpy(), return_inverse=True)
        rows = np.full(len(hashes), self._unseen_row, dtype=np.int64)
        if len(self._hashes):
            at = np.searchsorted(self._hashes, hashes).clip(max=len(self._hashes) - 1)
            rows = np.where(self._hashes[at] == hashes, self._rows[at], rows)
        return rows[place]


def _scaled(values: pl.Series, number: Mapping[str, Any]) -> np.ndarray:
    """The network's input, `[n]` float32."""
    value = formulas.filled(pl.col("x"), number["fill"], number["transform"])
    seen = (number[name] for name in ("low", "high", "mean", "deviation"))
    scaled = formulas.scaled(value, number["transform"], *seen)
    return values.alias("x").to_frame().select(scaled).to_series().to_numpy()


def _table_of(samples: Samples, columns: list[str]) -> pl.DataFrame:
    """The wanted columns; raises a ValueError if one is absent, or holds something else."""
    if type(samples).__module__.partition(".")[0] == "pandas":
        twice = [name for name in columns if list(samples.columns).count(name) > 1]
        if twice:
            raise ValueError(f"the column {twice[0]!r} appears twice; rename or drop one of them")
        # Without the pyarrow that polars would need.
        samples = {
            name: samples[name].astype(object).where(samples[name].notna(), None).tolist()
            for name in columns
            if name in samples.columns
        }
    elif not isinstance(samples, pl.DataFrame | Mapping):
        samples = list(samples)
        if other := [sample for sample in samples if not isinstance(sample, Mapping)]:
            raise ValueError(
                f"found the sample {other[0]!r}; write each sample as a mapping of columns to "
                "values, or all samples as a mapping of columns to lists or as a polars or pandas "
                "table"
            )
        shared = [name for name in columns if all(name in sample for sample in samples)]
        samples = {name: [sample[name] for sample in samples] for name in shared}
    given = samples.columns if isinstance(samples, pl.DataFrame) else samples
    if absent := [name for name in columns if name not in given]:
        raise ValueError(f"no column {absent[0]!r}; the model needs {', '.join(columns)}")
    series = [_series(name, samples[name]) for name in columns]
    if len({len(column) for column in series}) > 1:
        sizes = ", ".join(f"{column.name} {len(column)}" for column in series)
        raise ValueError(f"columns of different lengths: {sizes}")
    return pl.DataFrame(series)


def _series(name: str, values: Any) -> pl.Series:
    if isinstance(values, str):
        raise ValueError(f"column {name}: found {values!r}; write a list with a value per sample")
    if isinstance(values, list | tuple):
        values = _alike(name, values)
    found = pl.Series(name, values, strict=False)
    if found.dtype == pl.Object:
        # As pandas has them in columns of its own types.
        plain = [None if type(one).__name__ == "NAType" else one for one in values]
        found = pl.Series(name, _alike(name, plain), strict=False)
    if found.dtype == pl.Object:
        raise ValueError(f"column {name}: found {found[0]!r}; write text, numbers or lists")
    return found


def _alike(name: str, values: Sequence[Any]) -> Sequence[Any]:
    """Values of a column, which polars would turn into other text if their types differ."""
    are_lists = {isinstance(one, list | tuple | np.ndarray) for one in values if one is not None}
    if len(are_lists) > 1:
        raise ValueError(
            f"column {name}: found lists and single values; write lists in all samples or in none"
        )
    if True in are_lists:
        return [None if value is None else list(value) for value in values]
    are_booleans = {isinstance(one, bool | np.bool_) for one in values if one is not None}
    if len(are_booleans) > 1 or any(isinstance(value, str) for value in values):
        # Polars would write 3.0 instead of 3, 45.50 instead of 45.5, and 1 for True beside 2.
        texts = [formulas.text_of(value) for value in values]
        return [a if b is None else b for a, b in zip(values, texts, strict=True)]
    return values
