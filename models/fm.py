"""Factorization machine (Rendle, ICDM 2010, eq. 1 with d = 2)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from stampede.models.registry import NetworkShape, register


def second_order(embeddings: Tensor) -> Tensor:
    """`sum_{i<j} <e_i, e_j>`, `[batch]`, of embeddings `[batch, fields, dim]`.

    Computed as `0.5 * sum((sum_i e_i)^2 - sum_i e_i^2)`.
    """
    return 0.5 * (embeddings.sum(1).square() - embeddings.square().sum(1)).sum(1)


@register("fm", first_order=True)
class FM(nn.Module):
    """`sum_{i<j} <e_i, e_j>` over the ids; the first-order term is the model's.

    As in the authors' code, numbers take part in the first-order term only.

    Args:
        shape: not used.
        generator: not used.
    """

    def __init__(self, shape: NetworkShape, generator: torch.Generator) -> None:
        super().__init__()

    def forward(self, embeddings: Tensor, dense: Tensor) -> Tensor:
        """Logits `[batch]` from embeddings `[batch, fields, dim]`; numbers are not used."""
        return second_order(embeddings)
