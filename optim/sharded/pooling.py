"""The output of a lookup where FBGEMM does not compute it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from stampede.optim.native import kernels
from stampede.optim.sharded.lookups import ArrayLookup


def check_lookup(parts: Sequence[ArrayLookup], by_fbgemm: Callable[[], object]) -> None:
    """Check bags and ids of arrays that the C++ kernels handle, in parallel.

    Args:
        parts: of a lookup.
        by_fbgemm: FBGEMM's slower check, called where something is wrong; it says what, and
            refuses or mends it.

    Raises:
        IndexError: something is wrong still.
    """
    if all(map(_is_sound, parts)):
        return
    by_fbgemm()
    if not all(map(_is_sound, parts)):
        raise IndexError("the offsets of a lookup do not ascend from 0 to the number of its ids")


def _is_sound(part: ArrayLookup) -> bool:
    lookup = part.lookup
    return kernels.is_sound(lookup.indices, lookup.offsets, lookup.first_rows, lookup.rows)


def pool_by_kernel(parts: Sequence[ArrayLookup]) -> Tensor:
    """`[batch, columns]` float32: pooled rows of arrays that the C++ kernels handle.

    Args:
        parts: of a pooled lookup, in the order of their columns.
    """
    shape = parts[0].lookup.batch, parts[-1].columns.stop
    output = torch.empty(shape, dtype=torch.float32, device="cpu")
    for part in parts:
        lookup = part.lookup
        weights = lookup.per_sample_weights
        kernels.pool_rows_(
            part.array.weights,
            lookup.indices,
            lookup.offsets,
            lookup.first_rows,
            output[:, part.columns],
            mean=lookup.mean,
            weights=None if weights is None else weights.float().contiguous(),
        )
    return output


def look_up_in_torch(parts: Sequence[ArrayLookup]) -> Tensor:
    """A lookup in plain torch, summed in float32.

    Returns:
        `[batch, columns]` of pooled rows, or `[ids, dim]` where they are not pooled.
    """
    outputs = []
    for part in parts:
        lookup = part.lookup
        lengths, weights = lookup.offsets.diff(), lookup.per_sample_weights
        starts = lookup.first_rows.repeat_interleave(lookup.batch).repeat_interleave(lengths)
        values = part.array.weights[lookup.indices + starts].float()
        if not lookup.pooled:
            outputs.append(values)
            continue
        if weights is not None:
            values = values * weights[:, None]
        pooled = torch.segment_reduce(values, "sum", lengths=lengths, unsafe=True)
        if lookup.mean:
            pooled = pooled / lengths.clamp_min(1)[:, None]
        by_feature = pooled.view(lookup.features, lookup.batch, -1)
        outputs.append(by_feature.transpose(0, 1).reshape(lookup.batch, -1))
    return torch.cat(outputs, dim=1 if parts[0].lookup.pooled else 0)
