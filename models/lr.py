"""Logistic regression: the first-order term alone."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from stampede.models.registry import NetworkShape


class LogisticRegression(nn.Module):
    """`sum_f w_f[id] + <w, x>`, which is the model's; the network adds nothing to it.

    The embeddings are looked up and not used: `model.dim: 1` makes them small.

    Args:
        shape: not used.
        generator: not used.
    """

    def __init__(self, shape: NetworkShape, generator: torch.Generator) -> None:
        super().__init__()

    def forward(self, embeddings: Tensor, dense: Tensor) -> Tensor:
        """Zeros `[batch]`."""
        return embeddings.new_zeros(len(embeddings))
