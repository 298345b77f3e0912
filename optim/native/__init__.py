"""Kernels of rows on a CPU in C++, compiled when they are first needed."""

from __future__ import annotations

import threading
from pathlib import Path

import torch
from torch import Tensor

from stampede.native_library import Library, switched_off
from stampede.optim.lookup import Lookup
from stampede.optim.rows import RowGradients

_HERE = Path(__file__).parent
_ROWS = Library(
    *(_HERE / name for name in ("lookup.cpp", "adam.cpp", "waiting_rows.cpp")),
    headers=[_HERE / name for name in ("lookup.h", "adam.h")],
)
available, handles = _ROWS.available, _ROWS.handles

__all__ = ["available", "handles", "sum_by_row", "switched_off"]

_ROWS_A_WORD = 64
_ROWS_A_SUMMARY = 64 * _ROWS_A_WORD

# One workspace per thread, as several models may run backward at once.
_local = threading.local()


def sum_by_row(lookup: Lookup, grad: Tensor, dim: int) -> RowGradients:
    """Sum the gradient of a lookup's output by row.

    Args:
        grad: float32, `[batch, features * dim]` of a pooled output, or `[ids, dim]`.
        dim: columns of a row.

    Raises:
        IndexError: an id is outside its table.
    """
    # A slice of columns is read in place; other layouts are copied.
    grad = grad if grad.stride(1) == 1 else grad.contiguous()
    # Zeros for the bits that mark rows, and memory for one number per word of bits.
    summaries = -(-lookup.rows // _ROWS_A_SUMMARY)
    workspace = getattr(_local, "workspace", None)
    if workspace is None or len(workspace[1]) < summaries * _ROWS_A_WORD:
        workspace = _local.workspace = (
            torch.zeros(summaries * (_ROWS_A_WORD + 1), dtype=torch.int64),
            torch.empty(summaries * _ROWS_A_WORD, dtype=torch.int32),
        )
    ids = lookup.indices, lookup.offsets, lookup.first_rows, lookup.rows
    weights = lookup.float_weights if lookup.pooled else None
    found = torch.ops.stampede.sum_by_row(
        *ids, grad, dim, lookup.pooled, lookup.mean, weights, *workspace
    )
    return RowGradients(*found)
