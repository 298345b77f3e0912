"""The ids of a lookup in the tables of one array."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from stampede.optim.triton.runs import SortedRuns


@dataclass(frozen=True)
class Lookup:
    """The ids of one lookup in the tables of one array.

    Attributes:
        indices: `[occurrences]` int32 or int64 ids, each inside its table; those of a feature
            stand together, and in them those of a bag.
        offsets: `[features * batch + 1]` int32 or int64, where each bag begins; the first is 0.
        first_rows: `[features]` int64, where in the array each feature's table begins.
        rows: rows of the array.
        pooled: whether the bags are pooled; otherwise each occurrence has a gradient of its own.
        mean: whether pooling takes the mean.
        per_sample_weights: `[occurrences]` factors of a pooled lookup; None for 1.
    """

    indices: Tensor
    offsets: Tensor
    first_rows: Tensor
    rows: int
    pooled: bool = True
    mean: bool = False
    per_sample_weights: Tensor | None = None

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
        """Most distinct rows there can be."""
        return min(self.occurrences, self.rows)

    def bags_of(self, positions: Tensor) -> Tensor:
        """`[n]` int64, the bag of each position; bags are counted by feature, then by sample."""
        return torch.searchsorted(self.offsets, positions.to(self.offsets.dtype), right=True) - 1

    @cached_property
    def runs(self) -> SortedRuns:
        """The occurrences sorted by row, for the Triton kernels; sorted when first asked for."""
        from stampede.optim.triton.runs import sorted_runs

        return sorted_runs(self)

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        """Keep the memory until what is queued on a stream is done."""
        for tensor in (self.indices, self.offsets, self.first_rows, self.per_sample_weights):
            if tensor is not None:
                tensor.record_stream(stream)
        if "runs" in self.__dict__:
            self.runs.record_stream(stream)
