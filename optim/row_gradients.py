"""Rows, summed gradients and counts from the gradient of a parameter."""

from __future__ import annotations

import torch
from torch import Tensor

from stampede.optim.occurrences import ids_behind
from stampede.optim.rows import RowGradients, sum_by_row
from stampede.optim.settings import UpdateSettings


def row_gradients(param: Tensor, settings: UpdateSettings, counts: Tensor | None) -> RowGradients:
    """Read `param.grad`, dense or sparse.

    Args:
        param: a table, `[rows, dim]`.
        settings: its settings; without row thresholds a sparse gradient needs no counts, and a
            dense one only under `rows="touched"`, for it does not tell which rows occurred.
        counts: `[rows]` how often each row occurred, or None to take them from the gradient.

    Raises:
        ValueError: the counts are needed and lost, or do not fit the table.
    """
    grad, name = param.grad, f"a parameter of shape {tuple(param.shape)}"
    if counts is not None:
        _check(counts, param, name)
        counts = counts.to(grad.device, torch.int64)
    if grad.layout == torch.strided:
        return _dense(grad, settings, counts, name)
    if grad.layout != torch.sparse_coo or grad.sparse_dim() != 1:
        raise ValueError(
            f"the gradient of {name} is neither dense nor sparse by rows; a table's gradient comes "
            "from nn.Embedding or nn.EmbeddingBag"
        )
    values = grad._values()
    if values.dtype in (torch.float16, torch.bfloat16):
        values = values.float()
    summed = sum_by_row(grad._indices()[0], values, rows=len(param))
    if counts is not None:
        return summed._replace(counts=counts[summed.rows])
    if not settings.clip.by_row:
        return summed
    ids = ids_behind(param)
    if ids is None:
        raise ValueError(
            f"the sparse gradient of {name} is coalesced, so the counts of its ids are lost; "
            "usual causes are grad.coalesce(), DistributedDataParallel and the unscaling of a "
            "GradScaler; avoid these, or give step(counts={parameter: occurrences of each row}), "
            "summed over the ranks"
        )
    return summed if len(ids) == grad._nnz() else summed._replace(counts=_count(ids, summed.rows))


def _dense(
    grad: Tensor, settings: UpdateSettings, counts: Tensor | None, name: str
) -> RowGradients:
    if counts is None:
        if settings.clip.by_row or settings.rows == "touched":
            needed = "" if settings.clip.by_row else ", which rows='touched' needs"
            raise ValueError(
                f"the gradient of {name} is dense and does not tell how often each id "
                f"occurred{needed}; "
                "build the table with sparse=True (in TorchRec, pass sharders=cowclip_sharders() "
                "to DistributedModelParallel) and keep it out of penalties in the loss (l2= of the "
                "optimizer does the same), or give step(counts={parameter: occurrences of each "
                "row})"
            )
        rows = torch.arange(len(grad), device=grad.device)
        return RowGradients(rows, grad.detach(), torch.ones_like(rows))
    # A penalty in the loss reaches rows that did not occur.
    rows = ((counts > 0) | (grad != 0).any(1)).nonzero().flatten()
    return RowGradients(rows, grad.detach()[rows], counts[rows])


def _count(ids: Tensor, rows: Tensor) -> Tensor:
    """How often each of the sorted `rows` stands in `ids`."""
    found, times = torch.unique(ids, return_counts=True)
    position = torch.searchsorted(found, rows).clamp_max(len(found) - 1)
    return torch.where(found[position] == rows, times[position], 0)


def _check(counts: Tensor, param: Tensor, name: str) -> None:
    wrong = counts.shape != param.shape[:1] or counts.is_floating_point()
    if wrong or (counts < 0).any():
        raise ValueError(
            f"counts of {name}: shape {tuple(counts.shape)} and dtype {counts.dtype}; give one "
            f"integer of at least 0 per row, shape ({len(param)},)"
        )
