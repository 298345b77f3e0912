"""The CowClip rule: adaptive clipping of the gradient of each embedding row (id)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Variant = Literal["reference", "paper"]


@dataclass(frozen=True)
class CowClip:
    """Settings of CowClip (adaptive column-wise clipping, arXiv 2204.06240).

    The paper stores a table transposed: its *column* is a row, one id, of a TorchRec table.

    Args:
        ratio: largest gradient norm of a row relative to the norm of its weights (`r`).
        bound: lower bound of the weight norm in the threshold (`zeta`), so that small rows
            can still grow. 1e-5 on Criteo.
        variant: `reference` is the authors' code, where the bound is scaled by
            `ratio * sqrt(columns)`; `paper` compares with the bare bound.
        columns: only the first `columns` columns of a row are clipped and give its norms; the
            others take the plain update. `None`: all columns.

    Raises:
        ValueError: a value is out of range.
    """

    ratio: float = 1.0
    bound: float = 1e-5
    variant: Variant = "reference"
    columns: int | None = None

    def __post_init__(self) -> None:
        if not (math.isfinite(self.ratio) and self.ratio > 0):
            raise ValueError(f"CowClip: ratio is {self.ratio!r}; write a number above 0")
        if not (math.isfinite(self.bound) and self.bound >= 0):
            raise ValueError(f"CowClip: bound is {self.bound!r}; write a number of at least 0")
        if self.variant not in ("reference", "paper"):
            raise ValueError(f"CowClip: variant is {self.variant!r}; write 'reference' or 'paper'")
        if self.columns is not None and self.columns < 1:
            raise ValueError(f"CowClip: columns is {self.columns!r}; write 1 or more, or None")


def row_threshold(weight_norm: Tensor, counts: Tensor, dim: int, clip: CowClip) -> Tensor:
    """Largest gradient norm allowed for each row.

    `reference`: `r * max(||w||, r * sqrt(dim) * zeta) * max(c, 1)` (authors' `clip.py`);
    `paper`: `max(r * ||w||, zeta) * max(c, 1)`.

    Args:
        weight_norm: `[rows]` L2 norms of the clipped columns of the weights.
        counts: `[rows]` occurrences of each id in the global batch, any dtype.
        dim: number of clipped columns, never a padded one.
        clip: the settings.

    Returns:
        `[rows]`, dtype of `weight_norm`.
    """
    if clip.variant == "reference":
        threshold = clip.ratio * weight_norm.clamp_min(clip.ratio * math.sqrt(dim) * clip.bound)
    else:
        threshold = (clip.ratio * weight_norm).clamp_min(clip.bound)
    return threshold * counts.clamp_min(1).to(threshold.dtype)


def clip_rows_(grads: Tensor, weights: Tensor, counts: Tensor, clip: CowClip) -> Tensor:
    """Scale each row's gradient down to its threshold, in place.

    Args:
        grads: `[rows, dim]` gradients, L2 term included; changed in place.
        weights: `[rows, dim]` weights the gradients belong to.
        counts: `[rows]` occurrences of each id in the global batch.
        clip: the settings.

    Returns:
        `[rows]` bool: which rows were over their threshold.
    """
    dim = grads.shape[1] if clip.columns is None else clip.columns
    clipped = grads[:, :dim]
    grad_norm = torch.linalg.vector_norm(clipped, dim=1)
    weight_norm = torch.linalg.vector_norm(weights[:, :dim], dim=1)
    threshold = row_threshold(weight_norm, counts, dim, clip)
    # A zero row with a zero threshold would divide 0 by 0; its gradient stays zero.
    smallest = torch.finfo(grads.dtype).tiny
    clipped.mul_((threshold / torch.maximum(grad_norm, threshold).clamp_min(smallest))[:, None])
    return grad_norm > threshold
