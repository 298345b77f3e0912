"""DeepFM (arXiv 1703.04247): a factorization machine beside an MLP, over the same embeddings."""

from __future__ import annotations

import torch
import torch.fx
from torch import Tensor, nn

from stampede.models.fm import second_order
from stampede.models.mlp import MLP
from stampede.models.orders import joined_with_orders
from stampede.models.registry import NetworkShape

# Who traces a network symbolically is not to see the branches within.
torch.fx.wrap("joined_with_orders")
torch.fx.wrap("second_order")


class DeepFM(nn.Module):
    """`sum_{i<j} <e_i, e_j> + MLP([e_1 .. e_F, x])`; the first-order term is the model's.

    Args:
        shape: what comes in, and the widths of the MLP.
        generator: source of the initial weights.
    """

    def __init__(self, shape: NetworkShape, generator: torch.Generator) -> None:
        super().__init__()
        self.mlp = MLP(shape.inputs, shape.hidden, generator, shape.dropout, shape.normalization)

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
        """Logits `[batch]` with the first-order term, in fewer passes over the rows.

        See `register` for arguments and for when it is called.
        """
        inputs, orders = joined_with_orders(stored, dim, dense, number_weights, scale)
        return orders + self.mlp(inputs)
