"""DLRM (arXiv 1906.00091): scalar products of all pairs of embeddings, between two MLPs."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torchrec.models.dlrm import InteractionArch

from stampede.models.mlp import MLP, hidden_layers
from stampede.models.options import DLRMOptions
from stampede.models.registry import NetworkShape
from stampede.settings import SettingsError


class DLRM(nn.Module):
    """`MLP([p, <v_i, v_j> for i < j])`, the bottom MLP's `p = h(x)` and `v = (p, e_1 .. e_F)`.

    Without numbers there is no p. There is no first-order term.

    Raises:
        SettingsError: there are no pairs.
    """

    def __init__(
        self, shape: NetworkShape, generator: torch.Generator, options: DLRMOptions
    ) -> None:
        super().__init__()
        vectors = shape.fields + bool(shape.numbers)
        if vectors < 2:
            raise SettingsError(
                "model.name: dlrm multiplies pairs of embeddings, and the data have one id field "
                "and no numbers; write another network, such as wide_deep"
            )
        # TorchRec's module takes the first vector as its dense features.
        self.interaction = InteractionArch(vectors - 1)
        top = vectors * (vectors - 1) // 2
        self.bottom: nn.Module | None = None
        if shape.numbers:
            self.bottom = hidden_layers(shape.numbers, [*options.bottom, shape.dim], generator)
            top += shape.dim
        self.top = MLP(top, shape, generator)

    def forward(self, embeddings: Tensor, dense: Tensor) -> Tensor:
        """Logits `[batch]` from embeddings `[batch, fields, dim]` and numbers `[batch, n]`."""
        if self.bottom is None:
            pairs = self.interaction(embeddings[:, 0], embeddings[:, 1:])
            return self.top(pairs[:, embeddings.shape[2] :])
        return self.top(self.interaction(self.bottom(dense), embeddings))
