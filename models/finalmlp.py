"""FinalMLP (arXiv 2304.00902): two MLPs of gated embeddings, fused by a bilinear form."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from stampede.models.mlp import NumberEmbedding, glorot_normal_, hidden_layers, linear
from stampede.models.options import FinalMLPOptions
from stampede.models.registry import NetworkShape
from stampede.settings import SettingsError


class Gate(nn.Module):
    """`2 * sigmoid(MLP(c)) * z` with a learned vector c (eq. 3-4, without context features)."""

    def __init__(
        self, inputs: int, dim: int, hidden: Sequence[int], generator: torch.Generator
    ) -> None:
        super().__init__()
        # Zeros, as in the authors' code, would keep it and the hidden layers from ever learning.
        self.context = nn.Parameter(glorot_normal_(torch.empty(1, dim), generator))
        layers = [hidden_layers(dim, hidden, generator)] if hidden else []
        last = hidden[-1] if hidden else dim
        self.layers = nn.Sequential(*layers, linear(last, inputs, generator, bias=True))

    def forward(self, inputs: Tensor) -> Tensor:
        """`[batch, inputs]`, gated."""
        return inputs * (2.0 * torch.sigmoid(self.layers(self.context)))


class FinalMLP(nn.Module):
    """`<w_1, o_1> + <w_2, o_2> + sum_h o_1h^T W_h o_2h`, `o_s = MLP_s(gate_s(z))` (eq. 5-7).

    z are all embeddings, numbers among them, see `NumberEmbedding`; o_sh is the part of head h.
    There is no first-order term.

    Raises:
        SettingsError: an MLP's last width is not divisible by the number of heads.
    """

    def __init__(
        self, shape: NetworkShape, generator: torch.Generator, options: FinalMLPOptions
    ) -> None:
        super().__init__()
        inputs = (shape.fields + shape.numbers) * shape.dim
        streams = {"model.hidden": shape.hidden}
        streams["model.options.second"] = tuple(options.second or shape.hidden)
        for key, widths in streams.items():
            if widths[-1] % options.heads:
                raise SettingsError(
                    f"{key}: its last width, {widths[-1]}, is not divisible by "
                    f"model.options.heads, {options.heads}; change one of them"
                )
        self.heads = options.heads
        self.numbers = NumberEmbedding(shape.numbers, shape.dim, generator)
        self.gates = nn.ModuleList(
            nn.Identity()
            if options.gates is None
            else Gate(inputs, shape.dim, options.gates, generator)
            for _ in streams
        )
        self.mlps = nn.ModuleList(
            hidden_layers(inputs, widths, generator, shape.dropout, shape.normalization)
            for widths in streams.values()
        )
        first, second = (widths[-1] for widths in streams.values())
        self.first, self.second = (linear(w, 1, generator, bias=False) for w in (first, second))
        fusion = torch.empty(options.heads, first // options.heads, second // options.heads)
        self.fusion = nn.Parameter(glorot_normal_(fusion, generator))

    def forward(self, embeddings: Tensor, dense: Tensor) -> Tensor:
        """Logits `[batch]` from embeddings `[batch, fields, dim]` and numbers `[batch, n]`."""
        inputs = self.numbers(embeddings, dense).flatten(1)
        one, other = (mlp(gate(inputs)) for gate, mlp in zip(self.gates, self.mlps, strict=True))
        linear_terms = (self.first(one) + self.second(other)).squeeze(1)
        one, other = (part.unflatten(1, (self.heads, -1)) for part in (one, other))
        return linear_terms + (torch.einsum("bhi,hij->bhj", one, self.fusion) * other).sum((1, 2))
