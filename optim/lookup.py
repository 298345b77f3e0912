"""The ids of a lookup in the tables of one array, in order of the lookup and sorted by row."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

# Number of bits into which FBGEMM packs feature and sample of an occurrence.
_INFO_BITS = 32


@dataclass(frozen=True)
class SortedRuns:
    """Occurrences of ids, sorted by row; each row's occurrences are a run. All on one device."""

    rows: Tensor  # `[capacity]` int64, the distinct rows, sorted; undefined beyond `count`.
    # `[capacity + 1]` int32, the first occurrence of each run; beyond the runs, the number of
    # occurrences. Differences are the counts.
    starts: Tensor
    count: Tensor  # `[1]` int32, the number of runs.
    ordered: Tensor  # `[occurrences]` int64 or int32, the row of each sorted occurrence.
    # `[occurrences]` int32 or int64, which row of the gradient each takes: of that of a pooled
    # lookup seen as `[batch * features, dim]`, or its position in a sequence.
    source: Tensor
    coefficient: Tensor | None  # `[occurrences]` float32, factors of the gradients; None for 1.

    @property
    def capacity(self) -> int:
        """The most runs possible."""
        return self.rows.numel()

    @property
    def occurrences(self) -> int:
        """Number of ids of the lookup."""
        return self.ordered.numel()


@dataclass(frozen=True)
class Lookup:
    """The ids of one lookup in the tables of one array."""

    indices: Tensor  # `[occurrences]` int32 or int64, by feature, then by bag; each in its table.
    offsets: Tensor  # `[features * batch + 1]` int32 or int64, where bags begin; the first is 0.
    first_rows: Tensor  # `[features]` int64, where in the array each feature's table begins.
    rows: int  # Of the array.
    pooled: bool = True  # If not, each occurrence has its own gradient.
    mean: bool = False  # Whether pooling takes the mean.
    per_sample_weights: Tensor | None = None  # `[occurrences]` factors when pooled; None for 1.

    @classmethod
    def of_rows(cls, rows: Tensor, table_rows: int) -> Lookup:
        """A sequence of rows `[n]`, int64, of one table."""
        return cls(rows, rows.new_empty(0), rows.new_zeros(1), table_rows, pooled=False)

    @property
    def occurrences(self) -> int:
        """Number of ids."""
        return self.indices.numel()

    @property
    def features(self) -> int:
        """Number of features."""
        return self.first_rows.numel()

    @property
    def batch(self) -> int:
        """Samples of the batch."""
        return (self.offsets.numel() - 1) // self.features

    @property
    def capacity(self) -> int:
        """The most distinct rows possible."""
        return min(self.occurrences, self.rows)

    @property
    def float_weights(self) -> Tensor | None:
        """The per-sample weights as contiguous float32."""
        weights = self.per_sample_weights
        return None if weights is None else weights.float().contiguous()

    def bags(self) -> Tensor:
        """`[occurrences]` int64, the bag of each id, counted by feature, then by sample."""
        if not self.offsets.numel():
            # Rows without a batch, see `of_rows`.
            return torch.zeros_like(self.indices, dtype=torch.int64)
        lengths = self.offsets.diff()
        numbers = torch.arange(len(lengths), device=lengths.device)
        # Told the size, a GPU is not waited for.
        return numbers.repeat_interleave(lengths, output_size=self.occurrences)

    def rows_of(self, bags: Tensor) -> Tensor:
        """`[occurrences]` int64, the row of each id, given their bags."""
        return self.indices.to(torch.int64) + self.first_rows[bags // max(self.batch, 1)]

    def source_of(self, bags: Tensor) -> Tensor:
        """`[n]`, each bag's row in the gradient seen as `[batch * features, dim]`."""
        feature = bags // max(self.batch, 1)
        return (bags - feature * self.batch) * self.features + feature

    def share_of(self, bags: Tensor) -> Tensor:
        """`[n]` float32, the share that an id of each bag has in the bag's mean."""
        return self.offsets.diff().float().reciprocal()[bags]

    def coefficient(self, bags: Tensor | None, positions: Tensor | None = None) -> Tensor | None:
        """`[n]` float32 factor of the gradient of each id of a pooled lookup; None for 1.

        Args:
            bags: of the ids; read if pooling takes the mean.
            positions: which ids, if not all in their order; read if they have weights.
        """
        factor = self.float_weights
        if factor is not None and positions is not None:
            factor = factor[positions]
        if not self.mean:
            return factor
        share = self.share_of(bags)
        return share if factor is None else share * factor

    @cached_property
    def runs(self) -> SortedRuns:
        """The occurrences sorted by row when first asked for; by FBGEMM on a GPU."""
        return runs_from_fbgemm(self) if self.indices.is_cuda else runs_from_sort(self)

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        """Keep the memory until what is queued on a stream is done."""
        held = [self.indices, self.offsets, self.first_rows, self.per_sample_weights]
        if "runs" in self.__dict__:
            held += vars(self.runs).values()
        for tensor in held:
            if tensor is not None:
                tensor.record_stream(stream)


class LookedUpGradients(NamedTuple):
    """The gradient of a lookup's output, which nobody has summed by row yet."""

    lookup: Lookup
    grad: Tensor  # `[batch, features * dim]` of a pooled lookup, or `[ids, dim]`.


@torch.no_grad()
def runs_from_sort(lookup: Lookup) -> SortedRuns:
    """Sort a lookup by row with torch's stable sort, on any device."""
    bags = lookup.bags()
    ordered, order = torch.sort(lookup.rows_of(bags), stable=True)
    bags = bags[order]
    is_first = torch.ones_like(ordered, dtype=torch.bool)
    torch.ne(ordered[1:], ordered[:-1], out=is_first[1:])
    # Occurrences that begin no run go to an extra place at the end, which is cut off: selecting
    # the others would need their number on the host.
    run = torch.where(is_first, is_first.cumsum(0) - 1, lookup.capacity + 1)
    starts = torch.full(
        (lookup.capacity + 2,), lookup.occurrences, dtype=torch.int32, device=run.device
    ).scatter_(0, run, torch.arange(len(run), dtype=torch.int32, device=run.device))
    found = ordered.new_zeros(lookup.capacity + 2).scatter_(0, run, ordered)
    return SortedRuns(
        found[: lookup.capacity],
        starts[: lookup.capacity + 1],
        is_first.sum(0, keepdim=True, dtype=torch.int32),
        ordered,
        lookup.source_of(bags) if lookup.pooled else order,
        lookup.coefficient(bags, order) if lookup.pooled else None,
    )


@torch.no_grad()
def runs_from_fbgemm(lookup: Lookup) -> SortedRuns:
    """Sort a lookup by row as FBGEMM's own backward does; ids must be on a GPU.

    Its sort is stable, so the result equals that of `runs_from_sort`. Written for fbgemm 1.6 to
    1.8.
    """
    # Loads the operator.
    import fbgemm_gpu  # noqa: F401

    if not lookup.occurrences:
        return runs_from_sort(lookup)
    sample_bits = _INFO_BITS - lookup.features.bit_length()
    # For each occurrence FBGEMM gives either feature and sample, packed, or feature and position.
    by_position = (
        not lookup.pooled
        or lookup.per_sample_weights is not None
        or lookup.batch >= 1 << sample_bits
    )
    _, ordered, infos, rows, _, count, starts = torch.ops.fbgemm.transpose_embedding_input(
        # Its last entry, one past the last row, is not read.
        functional.pad(lookup.first_rows, (0, 1)),
        lookup.rows.bit_length(),
        lookup.indices.contiguous(),
        lookup.offsets.to(lookup.indices.dtype).contiguous(),
        nobag=by_position,
        info_B_num_bits=sample_bits,
        total_unique_indices=lookup.capacity,
    )
    positions = bags = None
    if by_position:
        source = positions = infos // lookup.features
        if lookup.pooled:
            bags = lookup.bags()[positions]
            source = lookup.source_of(bags)
    else:
        if lookup.batch * lookup.features >= 1 << 31:
            infos = infos.to(torch.int64)
        # The shift of a negative number brings in ones.
        feature = (infos >> sample_bits) & ((1 << (_INFO_BITS - sample_bits)) - 1)
        sample = infos & ((1 << sample_bits) - 1)
        source = sample * lookup.features + feature
        bags = feature * lookup.batch + sample if lookup.mean else None
    coefficient = lookup.coefficient(bags, positions) if lookup.pooled else None
    return SortedRuns(rows.to(torch.int64), starts, count, ordered, source, coefficient)
