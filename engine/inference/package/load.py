"""Scores with the model in this folder. Needs torch, safetensors, polars and numpy.

    from load import load          # with this folder on sys.path

    model = load()
    model.columns                  # of a sample
    model.score({"C1": ["68fd1e64", None], "I1": [3, None], ...})
    model.score([{"C1": "68fd1e64", "I1": 3, ...}, {"C1": None, "I1": None, ...}])
    model.score(samples, on_bad_value="missing")   # a bad value counts as missing
    model.bad_values                               # how many were bad, by column

A sample's values are those of the raw log: text or numbers, lists for cells with several ids, None
for missing values. Polars and pandas tables work too. `score_rows` takes ids that are already rows
of the model's tables.

Before use, every file is compared with its length and SHA-256 in `package.json`, which finds
damage. To load somebody else's package safely, call `load(folder)` of a `load.py` that you trust:
it executes nothing of the package, whose other files are data.
"""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import json
import os
import re
import stat
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

if TYPE_CHECKING:
    from encode import Encoded, Samples

HERE = Path(__file__).resolve().parent
FORMAT = 2

# The most bytes of `package.json` and `dense.json`.
_LARGEST_JSON = 1 << 26

# A file of the package, or of a folder in it.
NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")

_PRECISION = {"fp32": torch.float32, "fp16": torch.float16, "int8": torch.int8}


def load(folder: str | Path = HERE, device: str = "cpu") -> Model:
    """Load the model of a package.

    Args:
        folder: the package; by default this file's.
        device: for tables and dense layers.

    Raises:
        ValueError: it is not a package, has another format, or is damaged.
    """
    folder, device = Path(folder), torch.device(device)
    try:
        about, text = read_json(folder / "package.json")
    except (OSError, ValueError, RecursionError) as failure:
        raise ValueError(f"{folder}: no exported model here ({failure})") from None
    found = about.get("format") if isinstance(about, dict) else None
    if found != FORMAT:
        raise ValueError(
            f"{folder}: the package has format {found}, but this load.py reads {FORMAT}; export it "
            "again with: stampede export RUN FOLDER"
        )
    try:
        _check_files(folder, about, text)
        return Model(folder, about, device)
    except (MemoryError, torch.OutOfMemoryError):
        raise
    # A package made by hand may be wrong in any way.
    except Exception as failure:
        said = " ".join(str(failure).split())[:500]
        kind = "" if isinstance(failure, ValueError) else f"{type(failure).__name__}: "
        raise ValueError(f"{folder}: the package cannot be used: {kind}{said}") from None


def check(folder: str | Path) -> None:
    """Compare all files of a package with their SHA-256.

    Raises:
        ValueError: names the first that differs.
    """
    _check_files(Path(folder), *read_json(Path(folder) / "package.json"))


def check_about(about: Mapping[str, Any], text: bytes) -> None:
    """Compare `package.json` with its own SHA-256.

    Raises:
        ValueError: they differ.
    """
    digest = str(about["sha256"]).encode()
    # The SHA-256 of the file without its own digest.
    if hashlib.sha256(text.replace(digest, b"", 1)).hexdigest() != digest.decode():
        raise ValueError("package.json: its content has changed (SHA-256 differs)")


def _check_files(folder: Path, about: Mapping[str, Any], text: bytes) -> None:
    """Compare `package.json` with its own SHA-256, and all files with theirs.

    Raises:
        ValueError: names the first that differs.
    """
    check_about(about, text)
    files = about["files"]
    with ThreadPoolExecutor() as threads:
        found = threads.map(_difference, [folder] * len(files), files.items())
        for name, what in zip(files, found, strict=True):
            if what:
                raise ValueError(f"{name}: {what}; copy the package again, or export it again")


def _difference(folder: Path, file: tuple[str, Mapping[str, Any]]) -> str:
    """What is wrong with a file; empty if it matches `package.json`."""
    name, entry = file
    if not NAME.fullmatch(name):
        return "not a file name of a package"
    path = folder / name
    try:
        if not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder)):
            return "a link that leads out of the package"
        with _open(path) as opened:
            size = os.fstat(opened.fileno()).st_size
            if size != entry["bytes"]:
                return f"{size:,} bytes instead of {entry['bytes']:,}"
            if file_sha256(opened) != entry["sha256"]:
                return "its content has changed (SHA-256 differs)"
    except OSError as failure:
        return failure.strerror or str(failure)
    return ""


def _open(path: Path) -> BinaryIO:
    """Open a file, and refuse a pipe instead of waiting for it."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(errno.EINVAL, "is not a file", str(path))
    return path.open("rb")


def file_sha256(file: BinaryIO) -> str:
    """SHA-256 of an open file, in hexadecimal."""
    digest = hashlib.sha256()
    while block := file.read(1 << 20):
        digest.update(block)
    return digest.hexdigest()


def read_json(path: Path) -> tuple[Any, bytes]:
    """The content of a JSON file, and its bytes."""
    with _open(path) as file:
        content = file.read(_LARGEST_JSON + 1)
    if len(content) > _LARGEST_JSON:
        raise ValueError(f"{path.name} has more than {_LARGEST_JSON:,} bytes")
    return json.loads(content), content


def _sibling(name: str) -> ModuleType:
    """Import a file beside this one, whatever sys.path says."""
    spec = importlib.util.spec_from_file_location(f"{__name__}_{name}", HERE / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Model:
    """An exported model.

    Attributes:
        about: `package.json`.
        fields, numbers: names of the id fields and numbers, in the model's order.
        columns: the columns that they are made from.
        bad_values: numbers of values that the last call treated as missing, by column.
    """

    def __init__(self, folder: Path, about: Mapping[str, Any], device: torch.device) -> None:
        self.about = about
        self.fields = [field["name"] for field in about["fields"]]
        self.numbers = [number["name"] for number in about["numbers"]]
        files = {"dense.json", "dense.safetensors"}
        for field in about["fields"]:
            files.add(f"tables/{field['name']}.safetensors")
            if field["encode"] == "vocabulary":
                files.add(f"vocabularies/{field['name']}.parquet")
        if absent := sorted(files - set(about["files"])):
            raise ValueError(f"package.json: does not list {absent[0]}")
        # Only after the checks, as these files may be damaged too.
        self._encode = _sibling("encode")
        self._encoder = self._encode.Encoder(folder, about)
        self.columns = self._encoder.columns
        self.bad_values: dict[str, int] = {}
        self._device = device
        self._tables = [_table(folder, field, about, device) for field in about["fields"]]
        graph, _ = read_json(folder / "dense.json")
        weights = load_file(folder / "dense.safetensors")
        self._dense = _sibling("dense").Dense(graph, weights, device)
        self._try(about["dim"] + 1)

    @torch.no_grad()
    def _try(self, columns: int) -> None:
        """Compute some logits, to find a graph that does not fit the tables now."""
        rows = torch.zeros(2, len(self.fields), columns, device=self._device)
        logits = self._dense(rows, torch.zeros(2, len(self.numbers), device=self._device))
        if list(logits.shape) != [2]:
            raise ValueError(f"dense.json: two samples have logits {list(logits.shape)}")

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
            samples: values of `columns`: lists by name, a list of samples, or a polars or pandas
                table.
            batch_size: samples looked up at a time, at least 1.
            on_bad_value: `error`, or `missing`: a value that cannot be used counts as missing; in a
                cell with several ids, only the bad id is left out.

        Raises:
            ValueError: a column is absent, or a value cannot be used.
        """
        bad_values = self._encode.BadValues(on_bad_value)
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
        """Probability of a click of encoded samples, `[n]` float64.

        Args:
            ids: rows of each field's table, by field, sample after sample.
            numbers: `[n, numbers]`, transformed.
            lengths: `[n]` numbers of ids per sample, for fields with several.

        Raises:
            ValueError: a field is absent, an id is not a row of its table, lengths differ or do not
                sum to the number of ids, or a number is not finite.
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
            raise ValueError(f"found {sorted({*sizes, len(numbers)})} samples; write equal numbers")
        if numbers.shape[1] != len(self.numbers):
            raise ValueError(f"numbers: found {numbers.shape[1]}; write {len(self.numbers)}")
        encoded = self._encode.Encoded(rows, counts, numbers)
        return _probability(self._logits(encoded, batch_size))

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


def _table(
    folder: Path, field: Mapping[str, Any], about: Mapping[str, Any], device: torch.device
) -> dict[str, Tensor]:
    """The tensors of a field's table.

    Raises:
        ValueError: they do not match the field.
    """
    name, rows, dim = f"tables/{field['name']}.safetensors", field["rows"], about["dim"]
    table = load_file(folder / name, str(device))
    shapes = {"embedding": [rows, dim], "first_order": [rows]}
    shapes |= {"scale": [rows]} if about["rows"] == "int8" else {}
    found = {key: list(tensor.shape) for key, tensor in table.items()}
    if found != shapes or table["embedding"].dtype != _PRECISION[about["rows"]]:
        raise ValueError(f"{name}: found {found} {table['embedding'].dtype} instead of {shapes}")
    return table


def _rows(table: Mapping[str, Tensor], ids: Tensor) -> Tensor:
    """Embedding and first-order weight of ids as float32, `[n, dim + 1]`."""
    embedding = table["embedding"][ids].float()
    if "scale" in table:
        embedding = embedding * table["scale"][ids].unsqueeze(1)
    return torch.cat([embedding, table["first_order"][ids].float().unsqueeze(1)], 1)


def _table_rows(ids: Any, field: Mapping[str, Any]) -> np.ndarray:
    ids = _whole_numbers(ids, f"field {field['name']}")
    if len(ids) and (ids.min() < 0 or ids.max() >= field["rows"]):
        raise ValueError(f"field {field['name']}: an id is not a row from 0 to {field['rows'] - 1}")
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
    """`[n]` int64, in memory that torch can share."""
    values = np.asarray(values)
    if values.ndim != 1 or (len(values) and values.dtype.kind not in "iu"):
        raise ValueError(
            f"{what}: found {list(values.shape)} {values.dtype}; write whole numbers, [n]"
        )
    return np.require(values, np.int64, ["C", "W"])


def _numbers(values: Any) -> np.ndarray:
    """`[n, numbers]` float32, in memory that torch can share."""
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
