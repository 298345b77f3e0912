"""Deep Interest Network (arXiv 1706.06978)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from stampede.models.activations import activate
from stampede.models.mlp import MLP
from stampede.models.options import DINOptions
from stampede.models.registry import NetworkShape


class DIN(nn.Module):
    """`MLP([e_1 .. e_F, x])`; fields of `pooling: attention` hold what their queries attend to."""

    def __init__(
        self, shape: NetworkShape, generator: torch.Generator, options: DINOptions
    ) -> None:
        super().__init__()
        self.mlp = MLP(shape.inputs, shape, generator)
        activate(self.mlp.hidden, options.activation)

    def forward(self, embeddings: Tensor, dense: Tensor) -> Tensor:
        """Logits `[batch]` from embeddings `[batch, fields, dim]` and numbers `[batch, n]`."""
        return self.mlp(torch.cat([embeddings.flatten(1), dense], 1))
