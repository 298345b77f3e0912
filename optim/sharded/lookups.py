"""A lookup in fused tables, and the sums of its gradient by row."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from stampede.optim import native
from stampede.optim.lookup import Lookup
from stampede.optim.native import kernels
from stampede.optim.rows import RowGradients, sum_by_row
from stampede.optim.table_array import TableArray


class ArrayPlace(NamedTuple):
    """Where an array stands in the lookups of its fused tables.

    Attributes:
        features: whose tables it holds.
        columns: of these features in the pooled output.
        first_rows: `[features]` int64, the first row of each one's table in the array.
    """

    features: slice
    columns: slice
    first_rows: Tensor


class ArrayLookup(NamedTuple):
    """The part of a lookup that falls to one array.

    Attributes:
        array: the array.
        positions: of its ids in the lookup.
        columns: of its features in the pooled output.
        lookup: its ids.
    """

    array: TableArray
    positions: slice
    columns: slice
    lookup: Lookup


class LookupGradient(NamedTuple):
    """What a lookup hands in in backward.

    Attributes:
        parts: the lookup, array by array.
        grad: `[batch, columns]` gradient of the pooled output, or `[ids, columns]` of a sequence.
    """

    parts: list[ArrayLookup]
    grad: Tensor

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        """Keep the memory until what is queued on a stream is done."""
        self.grad.record_stream(stream)
        for part in self.parts:
            part.lookup.record_stream(stream)


def gradient_by_row(array: TableArray, lookup: Lookup, grad: Tensor) -> RowGradients:
    """Sum a gradient by row, on a CPU or in plain torch.

    Args:
        grad: `[batch, features * dim]` of the pooled output, or `[ids, dim]` of a sequence.
    """
    coefficients = None
    if lookup.pooled and lookup.per_sample_weights is not None:
        coefficients = lookup.per_sample_weights.float().contiguous()
    if native.handles(array.weights) and grad.dtype == torch.float32:
        return RowGradients(
            *kernels.sum_lookup(
                lookup.indices,
                lookup.offsets,
                lookup.first_rows,
                lookup.rows,
                grad,
                array.weights.shape[1],
                pooled=lookup.pooled,
                mean=lookup.mean,
                weights=coefficients,
            )
        )
    rows, source, share = _by_occurrence(lookup)
    if not lookup.pooled:
        return sum_by_row(rows, grad)
    if lookup.mean:
        coefficients = share if coefficients is None else share * coefficients
    return sum_by_row(rows, _of_bags(lookup, grad), source, coefficients)


def gradient_of_weights(array: TableArray, lookup: Lookup, grad: Tensor) -> Tensor:
    """`[ids]` float32: the gradient of the per-sample weights of a pooled lookup.

    Args:
        array: whose rows are as they were looked up.
        grad: `[batch, features * dim]` of the pooled output.
    """
    rows, source, share = _by_occurrence(lookup)
    products = array.weights[rows].float() * _of_bags(lookup, grad)[source].float()
    found = products.sum(1)
    return found * share if lookup.mean else found


def _of_bags(lookup: Lookup, grad: Tensor) -> Tensor:
    """`[batch * features, dim]` of `[batch, features * dim]`."""
    return grad.reshape(lookup.batch * lookup.features, grad.shape[1] // lookup.features)


def _by_occurrence(lookup: Lookup) -> tuple[Tensor, Tensor, Tensor]:
    """For each id of a lookup its row, its bag in `_of_bags`, and its share of a mean."""
    bags, features, batch = lookup.features * lookup.batch, lookup.features, lookup.batch
    lengths = lookup.offsets.diff()
    bag = torch.arange(bags, device=lengths.device)
    bag = torch.repeat_interleave(bag, lengths, output_size=lookup.occurrences)
    feature = bag // batch
    rows = lookup.indices.to(torch.int64) + lookup.first_rows[feature]
    source = (bag - feature * batch) * features + feature
    return rows, source, lengths.float().reciprocal()[bag]
