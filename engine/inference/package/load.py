"""Scores with the model in this folder. Needs torch, safetensors, polars and numpy.

    from load import load          # with this folder on sys.path

    model = load()
    model.columns                  # that a sample is made of
    model.score({"C1": ["68fd1e64", None], "I1": [3, None], ...})
    model.score([{"C1": "68fd1e64", "I1": 3, ...}, {"C1": None, "I1": None, ...}])
    model.score(samples, on_bad_value="missing")   # a bad value counts as missing
    model.bad_values                               # how many did, by column

A sample's values are those of the raw log: text or numbers, lists where a cell holds several ids,
None where a value is missing. Tables of polars and pandas will do too; `score_rows` takes ids that
are rows of the model's tables already.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

if TYPE_CHECKING:
    from encode import Encoded, Samples

HERE = Path(__file__).resolve().parent
FORMAT = 1

_spec = importlib.util.spec_from_file_location(f"{__name__}_encode", HERE / "encode.py")
encode = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(encode)


def load(folder: str | Path = HERE, device: str = "cpu") -> Model:
    """The model of a package.

    Args:
        folder: of the package; by default the one of this file.
        device: for tables and dense layers.

    Raises:
        ValueError: it is no package, or one of another format.
    """
    folder = Path(folder)
    try:
        about = json.loads((folder / "package.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as failure:
        raise ValueError(f"{folder}: no exported model here ({failure})") from None
    if about["format"] != FORMAT:
        raise ValueError(f"{folder}: format {about['format']}, but this load.py reads {FORMAT}")
    return Model(folder, about, torch.device(device))


class Model:
    """An exported model.

    Attributes:
        about: `package.json`.
        fields, numbers: names of the id fields and numbers, in the model's order.
        columns: that they are made of.
        bad_values: values that the last call took for missing ones, by column.
    """

    def __init__(self, folder: Path, about: Mapping[str, Any], device: torch.device) -> None:
        self.about = about
        self.fields = [field["name"] for field in about["fields"]]
        self.numbers = [number["name"] for number in about["numbers"]]
        self._encoder = encode.Encoder(folder, about)
        self.columns = self._encoder.columns
        self.bad_values: dict[str, int] = {}
        self._device = device
        self._dense = torch.export.load(folder / "dense.pt2").module().to(device)
        self._tables = [
            load_file(folder / "tables" / f"{name}.safetensors", str(device))
            for name in self.fields
        ]

    def score(
        self, samples: Samples, batch_size: int = 8192, on_bad_value: str = "error"
    ) -> np.ndarray:
        """Probability of a click of each sample, `[n]` float64; see `logits`."""
        return _probability(self.logits(samples, batch_size, on_bad_value))

    def logits(
        self, samples: Samples, batch_size: int = 8192, on_bad_value: str = "error"
    ) -> np.ndarray:
        """Logits of a click, `[n]` float32.

        Args:
            samples: values of the columns `columns`: by name, of one sample after the other, or
                as a table of polars or pandas.
            batch_size: samples looked up at a time, at least 1.
            on_bad_value: `error`, or `missing`: a value that cannot be used counts as missing; of
                several ids of a cell, it is left out.

        Raises:
            ValueError: a column is absent, or a value cannot be used.
        """
        bad_values = encode.BadValues(on_bad_value)
        encoded = self._encoder(samples, bad_values)
        self.bad_values = bad_values.counts
        return self._logits(encoded, batch_size)

    def score_rows(
        self,
        ids: Mapping[str, Any],
        numbers: Any = None,
        lengths: Mapping[str, Any] | None = None,
        batch_size: int = 8192,
    ) -> np.ndarray:
        """Probability of a click of samples that are encoded already, `[n]` float64.

        Args:
            ids: rows of each field's table, by field, sample after sample.
            numbers: `[n, numbers]`, transformed.
            lengths: ids of each sample, `[n]`, of the fields that have several.

        Raises:
            ValueError: a field is absent, an id is no row of its table, lengths differ or do not
                sum to the ids, or a number is not finite.
        """
        lengths = lengths or {}
        absent = [name for name in self.fields if name not in ids]
        if absent:
            raise ValueError(f"no ids of {absent[0]!r}; the fields are {', '.join(self.fields)}")
        other = [name for name in lengths if name not in self.fields]
        if other:
            raise ValueError(f"lengths of {other[0]!r}; the fields are {', '.join(self.fields)}")
        rows = [_table_rows(ids[field["name"]], field) for field in self.about["fields"]]
        counts = [
            _lengths(lengths[name], len(found), name) if name in lengths else None
            for name, found in zip(self.fields, rows, strict=True)
        ]
        sizes = {len(a) if n is None else len(n) for a, n in zip(rows, counts, strict=True)}
        numbers = _numbers(np.empty((max(sizes), 0)) if numbers is None else numbers)
        if {*sizes, len(numbers)} != sizes or len(sizes) > 1:
            raise ValueError(f"found {sorted({*sizes, len(numbers)})} samples; write equally many")
        if numbers.shape[1] != len(self.numbers):
            raise ValueError(f"numbers: found {numbers.shape[1]}; write {len(self.numbers)}")
        return _probability(self._logits(encode.Encoded(rows, counts, numbers), batch_size))

    @torch.no_grad()
    def _logits(self, encoded: Encoded, batch_size: int) -> np.ndarray:
        if batch_size < 1:
            raise ValueError(f"batch_size: found {batch_size}; write a number of at least 1")
        numbers = torch.from_numpy(encoded.numbers)
        ends = [None if lengths is None else np.cumsum(lengths) for lengths in encoded.lengths]
        found = [np.empty(0, np.float32)]
        for start in range(0, len(numbers), batch_size):
            stop = min(start + batch_size, len(numbers))
            rows = [
                self._looked_up(field, encoded, ends[field], start, stop)
                for field in range(len(self.fields))
            ]
            logits = self._dense(torch.stack(rows, 1), numbers[start:stop].to(self._device))
            found.append(logits.cpu().numpy())
        return np.concatenate(found)

    def _looked_up(
        self, field: int, encoded: Encoded, ends: np.ndarray | None, start: int, stop: int
    ) -> Tensor:
        """Embedding and first-order weight of some samples of a field, `[n, dim + 1]`."""
        table, ids, lengths = self._tables[field], encoded.ids[field], encoded.lengths[field]
        if lengths is None:
            return _rows(table, torch.from_numpy(ids[start:stop]).to(self._device))
        first, last = ends[start] - lengths[start], ends[stop - 1]
        rows = _rows(table, torch.from_numpy(ids[first:last]).to(self._device))
        counts = torch.from_numpy(lengths[start:stop]).to(self._device)
        return torch.segment_reduce(rows, "sum", lengths=counts, axis=0, initial=0.0)


def _rows(table: Mapping[str, Tensor], ids: Tensor) -> Tensor:
    """Embedding and first-order weight of ids as float32, `[n, dim + 1]`."""
    embedding = table["embedding"][ids].float()
    if "scale" in table:
        embedding = embedding * table["scale"][ids].unsqueeze(1)
    return torch.cat([embedding, table["first_order"][ids].float().unsqueeze(1)], 1)


def _table_rows(ids: Any, field: Mapping[str, Any]) -> np.ndarray:
    ids = _whole_numbers(ids, f"field {field['name']}")
    if len(ids) and (ids.min() < 0 or ids.max() >= field["rows"]):
        raise ValueError(f"field {field['name']}: an id is no row, 0 to {field['rows'] - 1}")
    return ids


def _lengths(lengths: Any, ids: int, name: str) -> np.ndarray:
    lengths = _whole_numbers(lengths, f"lengths of {name}")
    if len(lengths) and lengths.min() < 0:
        raise ValueError(f"lengths of {name}: found {lengths.min()}; write 0 or more")
    if lengths.sum() != ids:
        raise ValueError(
            f"lengths of {name}: their sum is {lengths.sum()}, but there are {ids} ids"
        )
    return lengths


def _whole_numbers(values: Any, what: str) -> np.ndarray:
    """`[n]` int64, in memory that torch may have."""
    values = np.asarray(values)
    if values.ndim != 1 or (len(values) and values.dtype.kind not in "iu"):
        raise ValueError(
            f"{what}: found {list(values.shape)} {values.dtype}; write whole numbers, [n]"
        )
    return np.require(values, np.int64, ["C", "W"])


def _numbers(values: Any) -> np.ndarray:
    """`[n, numbers]` float32, in memory that torch may have."""
    try:
        with np.errstate(over="ignore"):
            values = np.require(values, np.float32, ["C", "W"])
    except (TypeError, ValueError) as failure:
        raise ValueError(f"numbers: {failure}; write finite numbers") from None
    if values.ndim != 2:
        raise ValueError(f"numbers: found the shape {list(values.shape)}; write [n, numbers]")
    if not np.isfinite(values).all():
        found = values[~np.isfinite(values)][0]
        raise ValueError(f"numbers: found {found}; write finite numbers, transformed")
    return values


def _probability(logits: np.ndarray) -> np.ndarray:
    return torch.from_numpy(logits).double().sigmoid().numpy()
