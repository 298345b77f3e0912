"""Numbers as fields beside the ids'."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from stampede.models.mlp import glorot_normal_


class NumberEmbedding(nn.Module):
    """Gives number m a vector v_m of its own and the embedding `x_m * v_m` (AutoInt, eq. 4).

    Args:
        numbers: how many there are; with 0 nothing is added and nothing learned.
        dim: width of the embeddings.
        generator: source of the initial weights.
    """

    def __init__(self, numbers: int, dim: int, generator: torch.Generator) -> None:
        super().__init__()
        self.weight: nn.Parameter | None = None
        if numbers:
            self.weight = nn.Parameter(glorot_normal_(torch.empty(numbers, dim), generator))

    def forward(self, embeddings: Tensor, dense: Tensor) -> Tensor:
        """`[batch, fields + numbers, dim]` from `[batch, fields, dim]` and `[batch, numbers]`."""
        if self.weight is None:
            return embeddings
        return torch.cat([embeddings, dense.unsqueeze(2) * self.weight], 1)
