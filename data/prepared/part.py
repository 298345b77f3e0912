"""A part of a prepared data set: arrays in shards, gathered row by row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from stampede.data.samples import Bag, Samples

# Rows gathered at a time before they are turned: Criteo's ids then stay in the second-level cache.
_TILE = 4096

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Shard:
    """Some rows that stand together.

    Attributes:
        rows: their number.
        arrays: as the manifest names them: `ids`, `numbers`, `label`, perhaps `weight`, and
            `offsets_i`, `values_i` of the multi-valued fields.
        maps: the same as memory-mapped files, where they are.
    """

    rows: int
    arrays: Mapping[str, Tensor]
    maps: Mapping[str, np.memmap] = field(default_factory=dict)


@dataclass(frozen=True)
class ShardedPart:
    """The rows of all shards, one after the other.

    Attributes:
        shards: at least one, with the same arrays on the same device.
    """

    shards: tuple[Shard, ...]

    @cached_property
    def rows(self) -> int:
        """Number of rows."""
        return sum(shard.rows for shard in self.shards)

    @property
    def device(self) -> torch.device:
        """Where the arrays are."""
        return self.shards[0].arrays["label"].device

    @property
    def bytes(self) -> int:
        """Size of all arrays."""
        return sum(array.nbytes for shard in self.shards for array in shard.arrays.values())

    def read(self, rows: Tensor) -> Samples:
        """Gather rows.

        Args:
            rows: `[n]` int64, ascending where there are several shards, on `device`.

        Returns:
            The samples; the ids lie field by field in memory, as a batch wants them.
        """
        pieces = self._pieces(rows)
        arrays = self.shards[0].arrays
        bags = [name.split("_")[1] for name in arrays if name.startswith("offsets_")]
        return Samples(
            ids=self._ids(pieces, len(rows)),
            dense=self._gather("numbers", pieces, len(rows), torch.float32),
            label=self._gather("label", pieces, len(rows), torch.uint8),
            bags=tuple(self._bag(i, pieces) for i in bags),
            weight=self._weight(pieces, len(rows)),
        )

    def weight(self, rows: Tensor) -> Tensor | None:
        """Weights of rows as `read` wants them, `[n]` float32; None where there are none."""
        return self._weight(self._pieces(rows), len(rows))

    def shards_between(self, first: int, last: int) -> list[tuple[Shard, int, int]]:
        """The shards that hold the rows `first` to `last - 1`, and their own first and last."""
        starts = self._starts.tolist()
        return [
            (shard, max(first - start, 0), min(last - start, shard.rows))
            for shard, start in zip(self.shards, starts, strict=False)
            if start < last and first < start + shard.rows
        ]

    def resident(self, device: torch.device) -> ShardedPart:
        """The same rows with all arrays copied to `device`, in one shard."""
        joined = {
            name: self._joined_offsets(name, device)
            if name.startswith("offsets_")
            else _joined([shard.arrays[name] for shard in self.shards], device)
            for name in self.shards[0].arrays
        }
        return ShardedPart((Shard(self.rows, joined),))

    @cached_property
    def _starts(self) -> Tensor:
        """First row of each shard, and one past the last."""
        ends = torch.tensor([shard.rows for shard in self.shards]).cumsum(0)
        return torch.cat([ends.new_zeros(1), ends])

    def _pieces(self, rows: Tensor) -> list[tuple[Shard, Tensor, slice]]:
        """What each shard contributes: its own row numbers, and their place among `rows`."""
        if len(self.shards) == 1:
            return [(self.shards[0], rows, slice(0, len(rows)))]
        if not bool((rows[1:] >= rows[:-1]).all()):
            raise ValueError("the rows to read must ascend")
        cuts = torch.searchsorted(rows, self._starts.to(rows.device)).tolist()
        starts = self._starts.tolist()
        return [
            (shard, rows[cuts[i] : cuts[i + 1]] - starts[i], slice(cuts[i], cuts[i + 1]))
            for i, shard in enumerate(self.shards)
            if cuts[i + 1] > cuts[i]
        ]

    def _gather(
        self, name: str, pieces: list[tuple[Shard, Tensor, slice]], rows: int, dtype: torch.dtype
    ) -> Tensor:
        """Rows of an array, in the order of `pieces`."""
        like = self.shards[0].arrays[name]
        gathered = torch.empty((rows, *like.shape[1:]), dtype=dtype, device=like.device)
        for shard, local, here in pieces:
            if dtype == like.dtype:
                torch.index_select(shard.arrays[name], 0, local, out=gathered[here])
            else:
                gathered[here] = shard.arrays[name].index_select(0, local)
        return gathered

    def _ids(self, pieces: list[tuple[Shard, Tensor, slice]], rows: int) -> Tensor:
        like = self.shards[0].arrays["ids"]
        by_field = torch.empty(like.shape[1], rows, dtype=like.dtype, device=like.device)
        for shard, local, here in pieces:
            # A GPU gains nothing by tiles.
            tile = _TILE if like.device == _CPU else max(len(local), 1)
            for start in range(0, len(local), tile):
                wanted = local[start : start + tile]
                first = here.start + start
                turned = shard.arrays["ids"].index_select(0, wanted).T
                by_field[:, first : first + len(wanted)] = turned
        return by_field.T

    def _weight(self, pieces: list[tuple[Shard, Tensor, slice]], rows: int) -> Tensor | None:
        if "weight" not in self.shards[0].arrays:
            return None
        return self._gather("weight", pieces, rows, torch.float32)

    def _bag(self, i: str, pieces: list[tuple[Shard, Tensor, slice]]) -> Bag:
        like = self.shards[0].arrays[f"values_{i}"]
        # Also without any rows there are tensors to join.
        values, lengths = [like[:0]], [torch.empty(0, dtype=torch.int64, device=like.device)]
        for shard, local, _ in pieces:
            offsets = shard.arrays[f"offsets_{i}"]
            first = offsets.index_select(0, local)
            length = offsets.index_select(0, local + 1) - first
            before = length.cumsum(0) - length
            wanted = torch.repeat_interleave(first - before, length)
            wanted += torch.arange(len(wanted), device=like.device)
            values.append(shard.arrays[f"values_{i}"].index_select(0, wanted))
            lengths.append(length)
        return Bag(torch.cat(values), torch.cat(lengths))

    def _joined_offsets(self, name: str, device: torch.device) -> Tensor:
        joined, end = [torch.zeros(1, dtype=torch.int64, device=device)], 0
        for shard in self.shards:
            offsets = shard.arrays[name]
            joined.append(offsets[1:].to(device) + end)
            end += int(offsets[-1])
        return torch.cat(joined)


def _joined(arrays: list[Tensor], device: torch.device) -> Tensor:
    rows = sum(len(array) for array in arrays)
    joined = torch.empty((rows, *arrays[0].shape[1:]), dtype=arrays[0].dtype, device=device)
    first = 0
    for array in arrays:
        joined[first : first + len(array)] = array
        first += len(array)
    return joined
