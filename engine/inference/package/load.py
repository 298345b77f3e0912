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
damage. To load somebody else's package, call `load(folder)` of a `load.py` that you trust: it
executes nothing of the package, whose other files are data.
"""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import json
import math
import re
import stat
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import starmap
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from polars.exceptions import PolarsError
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import embedding_bag

if TYPE_CHECKING:
    from encode import Encoded, Samples

HERE = Path(__file__).resolve().parent
# Of packages, and of how they read values.
FORMAT, RULES = 5, 3

# Of a description; some 10 million rows of a graph or of shards.
_MOST_BYTES = 256 << 20

# Products of matrices add up the terms of the last rows in another order unless this divides their
# number.
_TOGETHER = 16

# Pooling of fields whose ids stay apart.
_APART = ("attention", "none")

# Places of a padded history: the first of these that are enough for its ids.
_PLACES = [16, 32, 48, *(places << n for n in range(40) for places in (64, 80, 96, 112))]

# What a damaged file may cause.
DAMAGE = (
    OSError, LookupError, RuntimeError, TypeError, AttributeError, ValueError, OverflowError,
    SafetensorError, PolarsError,
)  # fmt: skip

_CHANGED = "its content has changed (SHA-256 differs)"


def load(folder: str | Path = HERE, device: str = "cpu") -> Model:
    """Load the model of a package, by default this file's, onto a device.

    Args:
        folder: its path, or its URL, such as s3://bucket/package, which needs fsspec and the
            package of that store, such as s3fs.

    Raises:
        ValueError: it is not a package, has another format, or is damaged.
    """
    if "://" in str(folder):
        with tempfile.TemporaryDirectory() as copy:
            fetch(str(folder), copy)
            try:
                return load(copy, device)
            except ValueError as failure:
                raise ValueError(str(failure).replace(copy, str(folder))) from None
    folder = Path(folder)
    about = checked(folder)
    try:
        return Model(folder, about, torch.device(device))
    except DAMAGE as failure:
        raise ValueError(f"{folder}: the package cannot be used ({failure!s:.200})") from None


def fetch(url: str, folder: str) -> None:
    """Copy a package or a delta from an object store."""
    with store_of(url, "fetched") as (store, key):
        store.get(f"{key}/", f"{folder}/", recursive=True)


@contextmanager
def store_of(url: str, doing: str) -> Iterator[tuple[Any, str]]:
    """The fsspec file system of a URL and the key in it; what fails is a `ValueError`.

    Args:
        doing: what cannot be done to the URL then, such as "fetched".
    """
    # As `checked` of the trainer's store_access: a password may have slashes; only HDFS has a port.
    scheme, _, rest = url.rpartition("://")
    place, _, query = rest.partition("?")
    port = r"(?!\d+/)" if scheme.endswith("hdfs") else ""
    shown = ""
    if re.match(rf"[^/]*:{port}[^@]*@", rest):
        _, at, after = place.rpartition("@")
        shown = f"{scheme}://...{at}{after if at else ''}"
    elif re.search(r"(^|&)[\w-]*(sig|signature|key|token)=", query, re.IGNORECASE):
        shown = f"{scheme}://{place}?..."
    if shown:
        raise ValueError(f"{shown}: write the credentials into the environment, not into the URL")
    try:
        import fsspec

        store, key = fsspec.core.url_to_fs(url)
        yield store, key.rstrip("/")
    # The errors of the stores have no common type.
    except Exception as failure:
        raise ValueError(f"{url}: cannot be {doing} ({failure!s:.200})") from None


def checked(folder: Path) -> dict[str, Any]:
    """The content of `package.json`, after a comparison of all files with their SHA-256."""
    about = read_about(folder)

    def difference(name: str) -> str:
        entry, path = about["files"][name], folder / name
        try:
            if not path.resolve().is_relative_to(folder.resolve()):
                return "is a link out of the package"
            size = file_size(path)
            if size != entry["bytes"]:
                return f"{size:,} bytes instead of {entry['bytes']:,}"
            return "" if file_sha256(path) == entry["sha256"] else _CHANGED
        except OSError as failure:
            return failure.strerror or str(failure)

    with ThreadPoolExecutor() as threads:
        for name, what in zip(about["files"], threads.map(difference, about["files"]), strict=True):
            if what:
                raise ValueError(
                    f"{folder}: the package cannot be used: {name}: {what}; copy the package "
                    "again, or export it again"
                )
    return about


def read_about(folder: Path) -> dict[str, Any]:
    """The content of `package.json`, after a comparison with its own SHA-256."""
    try:
        text = read_file(folder / "package.json")
        about = parsed(text)
        found, digest = (about["format"], about.get("rules")), str(about.get("sha256"))
        files = dict(about.get("files", {}))
    except DAMAGE as failure:
        raise ValueError(f"{folder}: no exported model here ({failure!s:.200})") from None
    if found != (FORMAT, RULES):
        raise ValueError(
            "{}: the package has format {!r} and rules {!r}, ".format(folder, *found)
            + f"but this load.py reads {FORMAT} and {RULES}; export it again with: stampede export "
            "RUN FOLDER"
        )
    # The SHA-256 of the text without its own digest.
    if hashlib.sha256(text.replace(digest.encode(), b"", 1)).hexdigest() != digest:
        raise ValueError(f"{folder}: the package cannot be used: package.json: {_CHANGED}")
    for name, entry in files.items():
        is_inside = re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", name)
        if not is_inside or not isinstance(entry["bytes"], int):
            raise ValueError(
                f"{folder}: the package cannot be used: package.json: {name!r} is not a file of a "
                "package"
            )
    return about


def read_file(path: Path) -> bytes:
    """The content of a description, such as `package.json`."""
    if file_size(path) > _MOST_BYTES:
        raise ValueError(f"{path.name} has more than {_MOST_BYTES:,} bytes")
    return path.read_bytes()


def file_size(path: Path) -> int:
    """Length in bytes; opening a pipe, for example, would wait forever."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "is not a file", str(path))
    return status.st_size


def parsed(content: bytes) -> Any:
    """Values of JSON, all of whose numbers are finite."""
    return json.loads(content, parse_float=_finite, parse_constant=_finite)


def _finite(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError(f"{text} is not a finite number")
    return number


def file_sha256(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


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
        goals: names of the goals, if there are several; then scores and logits are `[n, goals]`.
        bad_values: numbers of values that the last call treated as missing, by column.
    """

    def __init__(self, folder: Path, about: Mapping[str, Any], device: torch.device) -> None:
        self.about = about
        self.fields = [field["name"] for field in about["fields"]]
        self.numbers = [number["name"] for number in about["numbers"]]
        # Packages without goals are older than the key.
        self.goals = list(about.get("goals", ()))
        self._encode = _sibling("encode")
        self._encoder = self._encode.Encoder(folder, about)
        self.columns = self._encoder.columns
        self.bad_values: dict[str, int] = {}
        self._device = device
        # A field may use the table of another.
        names = [field.get("table") or field["name"] for field in about["fields"]]
        tables = {
            name: load_file(folder / f"tables/{name}.safetensors", str(device))
            for name in dict.fromkeys(names)
        }
        self._tables = [tables[name] for name in names]
        graph = parsed(read_file(folder / "dense.json"))
        weights = load_file(folder / "dense.safetensors")
        self._dense = _sibling("dense").Dense(graph, weights, device)

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
        weights: Mapping[str, Any] | None = None,
    ) -> np.ndarray:
        """Probability of a click of encoded samples, `[n]` float64.

        Args:
            ids: rows of each field's table, by field, sample after sample.
            numbers: `[n, numbers]`, transformed.
            lengths: `[n]` numbers of ids per sample, for fields with several; 1 by default.
            weights: of the ids of fields that have some; 1 by default.

        Raises:
            ValueError: a field is absent, an id is not a row of its table, lengths do not sum to
                the number of ids, numbers of samples differ, or a number is not finite.
        """
        names = [field["name"] for field in self.about["fields"]]
        lengths = {
            name: _whole_numbers(f"lengths of {name}", n)
            for name, n in (lengths or {}).items()
            if name in names
        }
        rows = []
        for field in self.about["fields"]:
            name, size = field["name"], field["rows"]
            if name not in ids:
                raise ValueError(f"no ids of {name!r}; the fields are {', '.join(self.fields)}")
            found = _whole_numbers(name, ids[name])
            if len(found) and not 0 <= found.min() <= found.max() < size:
                raise ValueError(f"field {name}: an id is not a row from 0 to {size - 1}")
            if field.get("pooling") in _APART and name not in lengths:
                lengths[name] = np.ones(len(found), np.int64)
            if name in lengths and lengths[name].min(initial=0) < 0:
                raise ValueError(f"lengths of {name}: found {lengths[name].min()}; write 0 or more")
            if name in lengths and lengths[name].sum() != len(found):
                raise ValueError(
                    f"lengths of {name}: their sum is {lengths[name].sum()}, but there are "
                    f"{len(found)} ids"
                )
            rows.append(found)
        counts = [lengths.get(name) for name in self.fields]
        sizes = {len(a) if n is None else len(n) for a, n in zip(rows, counts, strict=True)}
        if numbers is None:
            numbers = np.empty((max(sizes), 0))
        numbers = np.require(numbers, np.float32, ["C", "W"])
        if len(sizes | {len(numbers)}) > 1:
            raise ValueError(f"found {sorted(sizes | {len(numbers)})} samples; write equal numbers")
        if numbers.shape[1:] != (len(self.numbers),) or not np.isfinite(numbers).all():
            raise ValueError(
                f"numbers: write finite numbers, transformed, [n, {len(self.numbers)}]"
            )
        found = [(weights or {}).get(name) for name in self.fields]
        for name, field, given in zip(self.fields, rows, found, strict=True):
            if given is not None and np.shape(given) != field.shape:
                raise ValueError(
                    f"weights of {name}: found {np.size(given)} for {len(field)} ids; write one "
                    "for each id"
                )
        encoded = self._encode.Encoded(rows, counts, numbers, found)
        return _probability(self._logits(encoded, batch_size))

    @torch.no_grad()
    def _logits(self, encoded: Encoded, batch_size: int) -> np.ndarray:
        if batch_size < 1:
            raise ValueError(f"batch_size: found {batch_size}; write a number of at least 1")
        numbers = torch.from_numpy(encoded.numbers)
        # Where the ids of each sample start, and end.
        bounds = [None if n is None else np.append(0, np.cumsum(n)) for n in encoded.lengths]
        pooling = [field.get("pooling") for field in self.about["fields"]]
        fields = list(zip(self._tables, pooling, encoded.ids, bounds, encoded.weights, strict=True))
        # As in training, where one multiplication and addition is rounded once, or twice.
        apart = {
            id(table) for table, how in zip(self._tables, pooling, strict=True) if how in _APART
        }
        padded = [how == "none" for how in pooling if how in _APART]
        found = [np.empty((0, len(self.goals)) if self.goals else 0, np.float32)]
        for start in range(0, len(numbers), batch_size):
            batch = slice(start, start + batch_size)
            pooled, histories = [], []
            for table, how, ids, of_field, weights in fields:
                rows, lengths, weights = self._looked_up(table, ids, of_field, batch, weights)
                if how in _APART:
                    histories.append((rows, lengths))
                if weights is not None and id(table) in apart:
                    rows, weights = rows * weights.unsqueeze(1), None
                if how != "none":
                    pooled.append(_pooled(rows, lengths, how, weights))
            given = together(pooled), numbers[batch].to(self._device), histories
            found.append(each_alone(self._dense, *given, padded).cpu().numpy())
        return np.concatenate(found)

    def _looked_up(
        self,
        table: dict[str, Tensor],
        ids: np.ndarray,
        bounds: np.ndarray | None,
        batch: slice,
        weights: np.ndarray | None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Embedding and first-order weight of each id of some samples, `[ids, dim + 1]`.

        Also the number of ids of each sample, if it is not one, and the weights of the ids.
        """
        if bounds is None:
            return looked_up(table, torch.from_numpy(ids[batch]).to(self._device)), None, None
        bounds = bounds[batch.start : batch.stop + 1]
        here = slice(bounds[0], bounds[-1])
        rows = looked_up(table, torch.from_numpy(ids[here]).to(self._device))
        lengths = torch.from_numpy(np.diff(bounds)).to(self._device)
        if weights is None:
            return rows, lengths, None
        of_ids = torch.from_numpy(np.require(weights[here], np.float32, ["C", "W"]))
        return rows, lengths, of_ids.to(self._device)


def looked_up(table: Mapping[str, Tensor], rows: Tensor | slice) -> Tensor:
    """Embedding and first-order weight of rows as float32, `[n, dim + 1]`."""
    embedding = table["embedding"][rows].float()
    if "scale" in table:
        embedding = embedding * table["scale"][rows].unsqueeze(1)
    return torch.cat([embedding, table["first_order"][rows].float().unsqueeze(1)], 1)


def _pooled(
    rows: Tensor, lengths: Tensor | None, how: str | None, weights: Tensor | None
) -> Tensor:
    """`[n, dim + 1]` of the rows of samples; zeros if the network attends to them."""
    if lengths is None:
        return rows
    if how == "attention":
        return rows.new_zeros(len(lengths), rows.shape[1])
    if weights is None:
        sums = torch.segment_reduce(rows, "sum", lengths=lengths, axis=0, initial=0.0)
    else:
        places = torch.arange(len(rows), device=rows.device)
        bags = places, rows, lengths.cumsum(0) - lengths
        sums = embedding_bag(*bags, mode="sum", per_sample_weights=weights)
    return sums / lengths.clamp(min=1).unsqueeze(1) if how == "mean" else sums


def together(pooled: Sequence[Tensor]) -> Tensor:
    """`[n, fields, columns]` of `[n, columns]` of each field; side by side if widths differ."""
    is_even = len({rows.shape[1] for rows in pooled}) == 1
    return torch.stack(list(pooled), 1) if is_even else torch.cat(list(pooled), 1)


def _filled_up(samples: Tensor, always: bool = False) -> Tensor:
    """With the last one repeated, `always` at least once; see `_TOGETHER`."""
    missing = -len(samples) % _TOGETHER or always * _TOGETHER
    last = samples[-1:].expand(missing, *samples.shape[1:])
    return torch.cat([samples, last]) if missing else samples


def each_alone(
    dense: Callable[[Tensor, Tensor, list[tuple[Tensor, Tensor]]], Tensor],
    rows: Tensor,
    numbers: Tensor,
    histories: Sequence[tuple[Tensor, Tensor]],
    padded: Sequence[bool],
) -> Tensor:
    """What `dense` computes of samples; the bits of each do not depend on the others.

    What a network computes of a padded history goes by the number of its places, so only samples
    whose own histories need as many places are computed together.

    Args:
        dense: called with rows, numbers, and for each history its rows and numbers of ids; if it
            is padded, rows `[n, places, dim + 1]` and which places hold ids.
        rows, numbers: `[n, ...]`.
        histories: rows of the ids, sample after sample, and the number of ids of each sample.
        padded: which of them `dense` takes padded.
    """
    # What fills up the ids belongs to one more sample.
    filled_up = partial(_filled_up, always=not all(padded))
    if not any(padded):
        of_ids = list(starmap(_filled_up_ids, histories))
        return dense(filled_up(rows), filled_up(numbers), of_ids)[: len(rows)]
    sizes = torch.tensor(_PLACES, device=rows.device)
    lengths = [n for (_, n), one in zip(histories, padded, strict=True) if one]
    places = torch.stack([sizes[torch.bucketize(n, sizes)] for n in lengths], 1)
    kinds, kind_of = places.unique(dim=0, return_inverse=True)
    found = []
    for kind, most in enumerate(kinds.tolist()):
        here = kind_of == kind
        parts = [(ids[here.repeat_interleave(n)], n[here]) for ids, n in histories]
        of_ids = [
            tuple(map(filled_up, _padded(*part, most.pop(0)))) if one else _filled_up_ids(*part)
            for part, one in zip(parts, padded, strict=True)
        ]
        of_kind = dense(filled_up(rows[here]), filled_up(numbers[here]), of_ids)
        found.append(of_kind[: len(parts[0][1])])
    # From groups to the samples' own order.
    return torch.cat(found)[kind_of.argsort(stable=True).argsort()]


def _padded(rows: Tensor, lengths: Tensor, places: int) -> tuple[Tensor, Tensor]:
    """The rows of samples as `[n, places, dim + 1]`, and which places hold one."""
    is_id = torch.arange(places, device=rows.device) < lengths.unsqueeze(1)
    values = rows.new_zeros(*is_id.shape, rows.shape[1])
    values[is_id] = rows
    return values, is_id


def _filled_up_ids(rows: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of ids and their numbers with more samples, the last of which fills up the ids."""
    missing = -len(rows) % _TOGETHER
    more = lengths.new_zeros(_TOGETHER - len(lengths) % _TOGETHER)
    more[-1] = missing
    return torch.cat([rows, rows.new_zeros(missing, rows.shape[1])]), torch.cat([lengths, more])


def _whole_numbers(name: str, values: Any) -> np.ndarray:
    """`[n]` int64, in memory that torch can share."""
    values = np.asarray(values)
    if values.ndim != 1 or (len(values) and values.dtype.kind not in "iu"):
        raise ValueError(
            f"{name}: found {list(values.shape)} {values.dtype}; write whole numbers, [n]"
        )
    return np.require(values, np.int64, ["C", "W"])


def _probability(logits: np.ndarray) -> np.ndarray:
    # As `stampede predict`. With numpy: the last bit of torch's depends on the place in an array.
    small = np.exp(-np.abs(logits.astype(np.float64)))
    return np.where(logits >= 0, 1.0, small) / (1.0 + small)
