"""AutoInt (arXiv 1810.11921): self-attention among the fields."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from stampede.models.mlp import MLP, NumberEmbedding, linear
from stampede.models.options import AutoIntOptions
from stampede.models.registry import NetworkShape


class InteractingLayer(nn.Module):
    """`relu([head_1 .. head_H] + W_res e)`, a head being `softmax(<Q e, K e>) V e` (eq. 5-8).

    The scalar products are not scaled. No layer has a bias. Maps `[batch, fields, inputs]` to
    `[batch, fields, heads * width]`.
    """

    def __init__(self, inputs: int, heads: int, width: int, generator: torch.Generator) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.residual = (
            linear(inputs, heads * width, generator, bias=False) for _ in range(4)
        )

    def forward(self, fields: Tensor) -> Tensor:
        """The fields' new vectors."""
        query, key, value = (
            layer(fields).unflatten(2, (self.heads, -1)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        # nn.MultiheadAttention would scale, and add biases and a projection.
        attended = functional.scaled_dot_product_attention(query, key, value, scale=1.0)
        return functional.relu(attended.transpose(1, 2).flatten(2) + self.residual(fields))


class AutoInt(nn.Module):
    """`<w, attention(e_1 .. e_F)>` (eq. 9), and an MLP of the embeddings in AutoInt+.

    Numbers are fields too, see `NumberEmbedding`. There is no first-order term.
    """

    def __init__(
        self, shape: NetworkShape, generator: torch.Generator, options: AutoIntOptions
    ) -> None:
        super().__init__()
        fields, width = shape.fields + shape.numbers, options.heads * options.width
        self.numbers = NumberEmbedding(shape.numbers, shape.dim, generator)
        self.attention = nn.Sequential(
            *(
                InteractingLayer(
                    width if layer else shape.dim, options.heads, options.width, generator
                )
                for layer in range(options.layers)
            )
        )
        self.output = linear(fields * width, 1, generator, bias=False)
        self.deep: nn.Module | None = None
        if options.deep:
            inputs = fields * shape.dim
            self.deep = MLP(inputs, shape.hidden, generator, shape.dropout, shape.normalization)

    def forward(self, embeddings: Tensor, dense: Tensor) -> Tensor:
        """Logits `[batch]` from embeddings `[batch, fields, dim]` and numbers `[batch, n]`."""
        fields = self.numbers(embeddings, dense)
        logits = self.output(self.attention(fields).flatten(1)).squeeze(1)
        return logits if self.deep is None else logits + self.deep(fields.flatten(1))
