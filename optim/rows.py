"""From occurrences of ids to rows: which rows, how often, and their summed gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional


class RowGradients(NamedTuple):
    """Gradients of the rows of one batch."""

    rows: Tensor  # `[n]` int64, sorted, distinct.
    grads: Tensor  # `[n, dim]` sum over a row's occurrences.
    counts: Tensor  # `[n]` int64, how often each row occurs; a repeat within one bag counts.

    def where(self, kept: Tensor) -> RowGradients:
        """The rows marked in `kept`, `[n]` bool."""
        return RowGradients(*(part[kept] for part in self))


def sum_by_row(
    occurrences: Tensor,
    source: Tensor,
    source_rows: Tensor | None = None,
    coefficients: Tensor | None = None,
) -> RowGradients:
    """Add up the gradients of each row, in the order of its occurrences.

    Args:
        occurrences: `[n]` int64, the row of each occurrence.
        source: `[m, dim]` gradients to pick from.
        source_rows: `[n]` int64, the row of `source` that belongs to each occurrence; `None`
            when they correspond one to one.
        coefficients: `[n]` factor of each occurrence's gradient; `None` for 1.
    """
    # A stable sort fixes the order of every sum, so the result does not vary from run to run.
    ordered, order = torch.sort(occurrences, stable=True)
    distinct, counts = torch.unique_consecutive(ordered, return_counts=True)
    picked = order if source_rows is None else source_rows[order]
    # A pooled lookup in the gradients: gathers and adds without an [n, dim] intermediate.
    grads = functional.embedding_bag(
        picked,
        source.contiguous(),
        offsets=counts.cumsum(0) - counts,
        mode="sum",
        per_sample_weights=None if coefficients is None else coefficients[order].to(source.dtype),
    )
    return RowGradients(distinct, grads, counts)


def merge_rows(parts: Sequence[RowGradients]) -> RowGradients:
    """Sum the gradients of several lookups or ranks, in the given order."""
    rows, grads, counts = (torch.cat(columns) for columns in zip(*parts, strict=True))
    merged = sum_by_row(rows, grads)
    # Each entry stands for several occurrences; counts add up like gradients.
    position = torch.searchsorted(merged.rows, rows)
    return merged._replace(counts=torch.zeros_like(merged.counts).index_add_(0, position, counts))
