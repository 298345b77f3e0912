"""Rows, summed gradients and counts from the gradient of a parameter."""

from __future__ import annotations

import torch
from torch import Tensor

from stampede.optim.clip import CowClip
from stampede.optim.rows import RowGradients, sum_by_row


def row_gradients(param: Tensor, clip: CowClip, counts: Tensor | None) -> RowGradients:
    """Read `param.grad`, dense or sparse.

    Args:
        param: a table, `[rows, dim]`.
        clip: its clipping rule; one without row thresholds needs no counts.
        counts: `[rows]` how often each row occurred, or None to take them from the gradient.

    Raises:
        ValueError: the counts are needed and lost, or do not fit the table.
    """
    grad, name = param.grad, f"a parameter of shape {tuple(param.shape)}"
    if counts is not None and (counts.shape != param.shape[:1] or counts.is_floating_point()):
        raise ValueError(
            f"counts of {name}: shape {tuple(counts.shape)} and dtype {counts.dtype}; give one "
            f"integer per row, shape ({len(param)},)"
        )
    if grad.layout == torch.strided:
        return _dense(grad, clip, counts, name)
    if counts is not None:
        summed = sum_by_row(grad._indices()[0], grad._values())
        return summed._replace(counts=counts.to(grad.device)[summed.rows])
    # A single entry has been seen once or not at all; both count as 1.
    if clip.by_row and grad.is_coalesced() and grad._nnz() > 1:
        raise ValueError(
            f"the sparse gradient of {name} is coalesced, so the counts of its ids are lost; "
            "usual causes are grad.coalesce(), DistributedDataParallel and the unscaling of a "
            "GradScaler; avoid these, or give step(counts={parameter: occurrences of each row})"
        )
    return sum_by_row(grad._indices()[0], grad._values())


def _dense(grad: Tensor, clip: CowClip, counts: Tensor | None, name: str) -> RowGradients:
    if counts is None:
        if clip.by_row:
            raise ValueError(
                f"the gradient of {name} is dense and does not tell how often each id occurred; "
                "build the table with sparse=True, or give step(counts={parameter: occurrences "
                "of each row})"
            )
        rows = torch.arange(len(grad), device=grad.device)
        return RowGradients(rows, grad.detach(), torch.ones_like(rows))
    rows = counts.to(grad.device).nonzero().flatten()
    return RowGradients(rows, grad[rows], counts.to(grad.device)[rows])
