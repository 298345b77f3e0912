"""Logistic regression, and Wide & Deep (arXiv 1606.07792): one beside an MLP."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from stampede.models.mlp import MLP
from stampede.models.registry import NetworkShape


class LogisticRegression(nn.Module):
    """`sum_f w_f[id] + <w, x>`, the model's first-order term; the network adds nothing to it.

    The embeddings are looked up but not used; `model.dim: 1` keeps them small.
    """

    def __init__(self, shape: NetworkShape, generator: torch.Generator) -> None:
        super().__init__()

    def forward(self, embeddings: Tensor, dense: Tensor) -> Tensor:
        """Zeros `[batch]`."""
        return embeddings.new_zeros(len(embeddings))


class WideDeep(nn.Module):
    """`MLP([e_1 .. e_F, x])`; the wide part is the model's first-order term.

    As in the authors' code, the wide part has no crossed columns.
    """

    def __init__(self, shape: NetworkShape, generator: torch.Generator) -> None:
        super().__init__()
        self.mlp = MLP(shape.inputs, shape, generator)

    def forward(self, embeddings: Tensor, dense: Tensor) -> Tensor:
        """Logits `[batch]` from embeddings `[batch, fields, dim]` and numbers `[batch, n]`."""
        return self.mlp(torch.cat([embeddings.flatten(1), dense], 1))
