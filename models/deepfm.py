"""Factorization machine (Rendle, ICDM 2010), and DeepFM (arXiv 1703.04247): one beside an MLP."""

from __future__ import annotations

import torch
import torch.fx
from torch import Tensor, nn

from stampede.models.fm_terms import joined_with_orders, second_order
from stampede.models.mlp import MLP
from stampede.models.registry import NetworkShape

# Symbolic tracing must not see the branches within.
torch.fx.wrap("joined_with_orders")
torch.fx.wrap("second_order")


class FM(nn.Module):
    """`sum_{i<j} <e_i, e_j>` over the ids (eq. 1 with d = 2); the first-order term is the model's.

    As in the authors' code, numbers take part in the first-order term only.
    """

    def __init__(self, shape: NetworkShape, generator: torch.Generator) -> None:
        super().__init__()

    def forward(self, embeddings: Tensor, dense: Tensor) -> Tensor:
        """Logits `[batch]` from embeddings `[batch, fields, dim]`; numbers are not used."""
        return second_order(embeddings)


class DeepFM(nn.Module):
    """`sum_{i<j} <e_i, e_j> + MLP([e_1 .. e_F, x])`; the first-order term is the model's."""

    def __init__(self, shape: NetworkShape, generator: torch.Generator) -> None:
        super().__init__()
        self.mlp = MLP(shape.inputs, shape, generator)

    def forward(self, embeddings: Tensor, dense: Tensor) -> Tensor:
        """Logits `[batch]` from embeddings `[batch, fields, dim]` and numbers `[batch, n]`."""
        inputs = torch.cat([embeddings.flatten(1), dense], 1)
        return second_order(embeddings) + self.mlp(inputs)

    def with_first_order(
        self,
        stored: Tensor,
        dim: int,
        dense: Tensor,
        number_weights: Tensor | None,
        scale: float = 1.0,
    ) -> Tensor:
        """Logits `[batch]` with the first-order term, in fewer passes; see `register`."""
        inputs, orders = joined_with_orders(stored, dim, dense, number_weights, scale)
        return orders + self.mlp(inputs)
