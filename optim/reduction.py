"""What belongs together but lies in several arrays or on several ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from stampede.optim.rows import RowGradients
from stampede.optim.table_array import TableArray


@dataclass
class PendingUpdate:
    """One array's share in a step.

    Attributes:
        array: what is updated.
        batch: summed gradients of the batch's rows, of the mean loss over the global batch; its
            rows count from the start of the array.
        lr: learning rate of this step.
        step: number of this step, counted from 1.
        swept_decay_factor: `[shards]` what the L2 term of rows that are not in the batch is
            multiplied by, besides the clip; None for 1.
    """

    array: TableArray
    batch: RowGradients
    lr: float
    step: int
    swept_decay_factor: Tensor | None = None

    def bounds_of(self, rows: Tensor) -> list[int]:
        """Where each shard's rows begin among sorted rows of the array, and one past the last."""
        starts = torch.tensor(self.array.starts, device=rows.device)
        return torch.searchsorted(rows, starts).tolist()


@dataclass
class TableSums:
    """Sums that run over all of a table, or over all tables.

    Attributes:
        by_table: float64 `[2]` by table: squared norms of the gradient and of the weights.
        everything: float64 `[2]`, the same over all tables clipped together, or None.
        nonfinite: float64 scalar, above 0 where a non-finite gradient forbids the step.
    """

    nonfinite: Tensor
    by_table: dict[str, Tensor] = field(default_factory=dict)
    everything: Tensor | None = None


class Reduction(Protocol):
    """Adds up over the shards of a table. Every rank makes the same calls in the same order.

    Attributes:
        device: of the sums of a rank without tables.
    """

    device: torch.device

    def sum_columns_(
        self, updates: Sequence[PendingUpdate], values: Sequence[Tensor], *, all_rows: bool
    ) -> None:
        """Add up `[k, n]` values of rows over the column shards of their table, in place.

        Args:
            updates: the arrays.
            values: of each array, for the rows of its batch, or for all of its rows.
        """

    def sum_tables_(self, sums: TableSums) -> None:
        """Add up over ranks, in place."""


class NoReduction:
    """Whole tables in one process: there is nothing to add up."""

    device = torch.device("cpu")

    def sum_columns_(
        self, updates: Sequence[PendingUpdate], values: Sequence[Tensor], *, all_rows: bool
    ) -> None:
        """Nothing."""

    def sum_tables_(self, sums: TableSums) -> None:
        """Nothing."""
