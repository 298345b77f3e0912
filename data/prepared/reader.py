"""A prepared data set, opened without reading it and gathered row by row."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from stampede.data.errors import DataError
from stampede.data.learning.learned import rows_of_new_ids
from stampede.data.parallel import run_tasks
from stampede.data.prepared.manifest import (
    LEARNED_FOLDER,
    MANIFEST,
    REMEDY,
    FieldEntry,
    Manifest,
    PartName,
    read_manifest,
)
from stampede.data.prepared.verify import map_shard
from stampede.data.samples import Bag, Dataset, Samples
from stampede.settings import cut

# Rows gathered at a time before they are transposed: Criteo's ids then stay in the second-level
# cache.
_TILE = 4096

# Types as read, where they differ from those of the files.
_DTYPES = {"ids": None, "numbers": torch.float32, "label": torch.float32, "weight": None}

_CPU = torch.device("cpu")


def open_prepared(folder: Path, opening: OpenPart | None = None) -> Dataset:
    """The data set in a prepared folder, memory-mapped.

    Args:
        opening: of each part; default: `open_part`.

    Raises:
        DataError: it is no prepared data set, or a file is absent or not as the manifest says.
    """
    manifest, opening = read_manifest(folder), opening or open_part
    for part in ("train",) if manifest.period else ("train", "test"):
        if not manifest.rows(part):
            raise DataError(
                f"{folder / MANIFEST}: the {part} part has no rows; prepare the data again with "
                "another split"
            )
    has_validation = manifest.rows("validation") > 0
    entries = {entry.name: entry for entry in manifest.fields}
    train = opening(folder, manifest, "train")
    if manifest.period:
        new = rows_of_new_ids(folder / LEARNED_FOLDER, REMEDY)
        test = BeforePeriod(train, manifest.fields, new)
    else:
        new, test = {}, opening(folder, manifest, "test")
    return Dataset(
        vocabulary_sizes={name: entry.rows for name, entry in entries.items()},
        numbers=len(manifest.numbers),
        train=train,
        validation=opening(folder, manifest, "validation") if has_validation else None,
        test=test,
        multi=tuple(entry.name for entry in manifest.multi()),
        mean=tuple(entry.name for entry in manifest.multi() if entry.pooling == "mean"),
        weighted=tuple(entry.name for entry in manifest.multi() if entry.weighted),
        attention={e.name: e.query for e in manifest.multi() if e.pooling == "attention"},
        sequences={e.name: e.query for e in manifest.multi() if e.pooling == "none"},
        shared={n: entry.table for n, entry in entries.items() if entry.table is not None},
        goals=tuple(manifest.goals),
        has_weight=manifest.has_weight,
        unknown_rows={name: entry.unknown_rows for name, entry in entries.items()},
        unseen_rows={n: e.unseen_row for n, e in entries.items() if e.unseen_row is not None},
        features=cut(str(manifest.source.get("features", ""))),
        advice=cut(str(manifest.source.get("advice", ""))),
        period=manifest.period,
        rows_before=manifest.rows_before,
        rows_of_new_ids=new,
    )


def open_part(
    folder: Path,
    manifest: Manifest,
    part: PartName,
    wanted: Callable[[str], bool] = lambda name: True,
) -> ShardedPart:
    """The `wanted` arrays of a part of a prepared folder; raises as `open_prepared`."""
    # A batch needs no time.
    names = [name for name in manifest.arrays() if name != "time" and wanted(name)]
    shards = []
    for entry in manifest.parts[part]:
        maps = map_shard(folder, entry, names)
        with warnings.catch_warnings():
            # The maps are read-only, and nothing here writes to them.
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            arrays = {name: torch.from_numpy(a) for name, a in maps.items()}
        shards.append(Shard(entry.rows, arrays, maps))
    return ShardedPart(tuple(shards))


OpenPart = Callable[[Path, Manifest, PartName], "ShardedPart"]


@dataclass(frozen=True)
class Shard:
    """Rows that are stored together."""

    rows: int
    arrays: Mapping[str, Tensor]  # by their names in the manifest
    # Arrays that are memory-mapped files.
    maps: Mapping[str, np.memmap] = field(default_factory=dict)


class BeforePeriod:
    """The rows of a period with its ids as the model knew them before it: new ids were unseen.

    `new` are the rows of the tables that new ids got, by field.
    """

    def __init__(
        self, part: ShardedPart, fields: Sequence[FieldEntry], new: Mapping[str, np.ndarray]
    ) -> None:
        self._part = part
        self.rows, self.device = part.rows, part.device
        self.label, self.weight = part.label, part.weight
        # By field, the earlier row of each row; None if the field has no vocabulary.
        before: list[Tensor | None] = []
        for entry in fields:
            earlier = None
            if entry.name in new and entry.unseen_row is not None:
                earlier = torch.arange(entry.rows)
                earlier[torch.from_numpy(new[entry.name])] = entry.unseen_row
            before.append(earlier)
        single = sum(not entry.multi for entry in fields)
        self._single, self._multi = before[:single], before[single:]

    def read(self, rows: Tensor) -> Samples:
        """See `Part`."""
        samples = self._part.read(rows)
        # The samples are a copy.
        for column, before in zip(samples.ids.T, self._single, strict=True):
            if before is not None:
                column.copy_(before[column.long()])
        bags = [
            bag if before is None else replace(bag, values=before[bag.values.long()].to(bag.values))
            for bag, before in zip(samples.bags, self._multi, strict=True)
        ]
        return replace(samples, bags=tuple(bags))


class _Piece(NamedTuple):
    """Requested rows of one shard, numbered within it, and where they go."""

    shard: Shard
    rows: Tensor
    first: int


@dataclass(frozen=True)
class ShardedPart:
    """The rows of all shards (at least one, with the same arrays on one device), in their order.

    `skipped` rows of the first shard are no rows of the part.
    """

    shards: tuple[Shard, ...]
    skipped: int = 0

    @cached_property
    def rows(self) -> int:
        """Number of rows."""
        return sum(shard.rows for shard in self.shards) - self.skipped

    def last(self, rows: int) -> ShardedPart:
        """The last so many of its rows, which are at least one."""
        shards, skipped = list(self.shards), self.skipped + self.rows - rows
        while skipped >= shards[0].rows:
            skipped -= shards.pop(0).rows
        return replace(self, shards=tuple(shards), skipped=skipped)

    @property
    def device(self) -> torch.device:
        """Device of the arrays."""
        return self.shards[0].arrays["label"].device

    @property
    def bytes(self) -> int:
        """Size of all arrays, the same in any number of shards."""
        size = sum(array.nbytes for shard in self.shards for array in shard.arrays.values())
        # Offsets, int64, have one more than rows in each shard.
        bags = sum(name.startswith("offsets_") for name in self.shards[0].arrays)
        return size - 8 * bags * (len(self.shards) - 1)

    def read(self, rows: Tensor) -> Samples:
        """Gather rows; the ids are stored field by field, as a batch needs them.

        Args:
            rows: `[n]` int64 on `device`. With several shards every ascending stretch of them costs
                time, so stretches should be long.
        """
        pieces = self._pieces(rows)
        names = self.shards[0].arrays
        read = self._gather([name for name in _DTYPES if name in names], pieces, len(rows))
        return Samples(
            ids=read["ids"].T,
            dense=read["numbers"],
            label=read["label"],
            bags=self._bags(pieces),
            weight=read.get("weight"),
        )

    def label(self, rows: Tensor) -> Tensor:
        """Labels of rows, given as to `read`: `[n]` or `[n, goals]` float32."""
        return self._gather(["label"], self._pieces(rows), len(rows))["label"]

    def weight(self, rows: Tensor) -> Tensor | None:
        """Weights of rows, given as to `read`: `[n]` float32; None if the data have no weights."""
        if "weight" not in self.shards[0].arrays:
            return None
        return self._gather(["weight"], self._pieces(rows), len(rows))["weight"]

    def shards_between(self, first: int, last: int) -> list[tuple[Shard, int, int]]:
        """The shards that hold the rows `first` to `last - 1`, and their own first and last."""
        first, last = first + self.skipped, last + self.skipped
        return [
            (shard, max(first - start, 0), min(last - start, shard.rows))
            for shard, start in zip(self.shards, self._starts.tolist(), strict=False)
            if start < last and first < start + shard.rows
        ]

    def resident(self, device: torch.device) -> ShardedPart:
        """The same rows with all arrays copied to `device`, in one shard."""
        joined = {}
        for name in self.shards[0].arrays:
            arrays = [shard.arrays[name] for shard in self.shards]
            if name.startswith("offsets_"):
                ends, end = [torch.zeros(1, dtype=torch.int64, device=device)], 0
                for offsets in arrays:
                    ends.append(offsets[1:].to(device) + end)
                    end += int(offsets[-1])
                joined[name] = torch.cat(ends)
                continue
            # Joined on the device, to save memory on the host.
            rows = [len(array) for array in arrays]
            shape = (sum(rows), *arrays[0].shape[1:])
            joined[name] = torch.empty(shape, dtype=arrays[0].dtype, device=device)
            for here, array in zip(joined[name].split(rows), arrays, strict=True):
                here.copy_(array)
        return ShardedPart((Shard(self.skipped + self.rows, joined),), self.skipped)

    @cached_property
    def _starts(self) -> np.ndarray:
        """First row of each shard, and one past the last."""
        return np.cumsum([0, *(shard.rows for shard in self.shards)])

    def _pieces(self, rows: Tensor) -> list[_Piece]:
        """By shard, the numbers of the requested rows within it, and their places among `rows`."""
        rows = rows + self.skipped if self.skipped else rows
        if len(self.shards) == 1:
            return [_Piece(self.shards[0], rows, 0)]
        stretches = np.flatnonzero(np.diff(rows.numpy()) < 0) + 1
        pieces = []
        for begin, end in pairwise([0, *stretches.tolist(), len(rows)]):
            cuts = begin + np.searchsorted(rows[begin:end].numpy(), self._starts)
            pieces += [
                _Piece(shard, rows[first:last] - start, first)
                for shard, start, first, last in zip(
                    self.shards, self._starts[:-1].tolist(), cuts[:-1], cuts[1:], strict=True
                )
                if first < last
            ]
        return pieces

    def _gather(self, names: Sequence[str], pieces: list[_Piece], rows: int) -> dict[str, Tensor]:
        """Rows of some arrays, in the order of `pieces`; ids transposed to `[fields, rows]`."""
        gathered = {}
        for name in names:
            like = self.shards[0].arrays[name]
            columns = tuple(like.shape[1:])
            shape = (*columns, rows) if name == "ids" else (rows, *columns)
            dtype = _DTYPES[name] or like.dtype
            gathered[name] = torch.empty(shape, dtype=dtype, device=like.device)
        fill = partial(_fill, gathered)
        if self.device == _CPU:
            tiles = [
                _Piece(shard, wanted[start : start + _TILE], first + start)
                for shard, wanted, first in pieces
                for start in range(0, len(wanted), _TILE)
            ]
            run_tasks(fill, tiles)
        else:
            for piece in pieces:
                fill(piece)
        return gathered

    def _bags(self, pieces: list[_Piece]) -> tuple[Bag, ...]:
        """Ids of every multi-valued field."""
        names = [name for name in self.shards[0].arrays if name.startswith("offsets_")]
        found = []
        for name in names:
            # Start and number of each row's ids.
            bounds = []
            for shard, rows, _ in pieces:
                first = shard.arrays[name].index_select(0, rows)
                bounds.append((first, shard.arrays[name].index_select(0, rows + 1) - first))
            found.append(bounds)
        # The host has to know how many ids there are: one wait for a device instead of many.
        counts = [length.sum() for bounds in found for _, length in bounds]
        left = iter(torch.stack(counts).tolist() if counts else [])
        bags = []
        for name, bounds in zip(names, found, strict=True):
            kinds = [name.replace("offsets_", kind) for kind in ("values_", "weights_")]
            arrays = self.shards[0].arrays
            # There must be tensors to join even without rows.
            found_of = {kind: [arrays[kind][:0]] for kind in kinds if kind in arrays}
            like = arrays[kinds[0]]
            lengths = [torch.empty(0, dtype=torch.int64, device=like.device)]
            for piece, (first, length) in zip(pieces, bounds, strict=True):
                before = length.cumsum(0) - length
                count = next(left)
                wanted = torch.repeat_interleave(first - before, length, output_size=count)
                wanted += torch.arange(count, device=like.device)
                for kind, parts in found_of.items():
                    parts.append(piece.shard.arrays[kind].index_select(0, wanted))
                lengths.append(length)
            values, *weights = map(torch.cat, found_of.values())
            bags.append(Bag(values, torch.cat(lengths), *weights))
        return tuple(bags)


def _fill(gathered: Mapping[str, Tensor], piece: _Piece) -> None:
    """Gather the rows of one piece."""
    here = slice(piece.first, piece.first + len(piece.rows))
    for name, out in gathered.items():
        array, rows = piece.shard.arrays[name], piece.rows
        if out.device == _CPU:
            # numpy gathers on one core nearly as fast as torch does on two.
            taken, out = array.numpy().take(rows.numpy(), 0), out.numpy()
        else:
            taken = array.index_select(0, rows)
        if name == "ids":
            out[:, here] = taken.T
        else:
            out[here] = taken
