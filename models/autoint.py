"""AutoInt (arXiv 1810.11921): self-attention among the fields."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from stampede.models.mlp import MLP, NumberEmbedding, linear
from stampede.models.options import AutoIntOptions, DESTINEOptions
from stampede.models.registry import NetworkShape


class InteractingLayer(nn.Module):
    """`relu([head_1 .. head_H] + W_res e)`, a head being `softmax(<Q e, K e>) V e` (eq. 5-8).

    The scalar products are not scaled. No layer has a bias. Maps `[batch, fields, inputs]` to
    `[batch, fields, heads * width]`.
    """

    def __init__(self, inputs: int, options: AutoIntOptions, generator: torch.Generator) -> None:
        super().__init__()
        self.heads = options.heads
        self.query, self.key, self.value, self.residual = (
            linear(inputs, options.heads * options.width, generator, bias=False) for _ in range(4)
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


class FieldAttention(nn.Module):
    """`<w, attention(e_1 .. e_F)>`, and an MLP of the embeddings with the option `deep`.

    Numbers are fields too, see `NumberEmbedding`.

    Args:
        layer: of the attention; built with its width of inputs, the options and the generator.
        residual: add `W e` to what the attention gives.
        relu: apply ReLU to the sum.
    """

    def __init__(
        self,
        shape: NetworkShape,
        generator: torch.Generator,
        options: AutoIntOptions | DESTINEOptions,
        layer: type[nn.Module],
        *,
        residual: bool = False,
        relu: bool = False,
    ) -> None:
        super().__init__()
        fields, dim, width = shape.fields + shape.numbers, shape.dim, options.heads * options.width
        self.relu = relu
        self.numbers = NumberEmbedding(shape.numbers, dim, generator)
        inputs = [dim] + [width] * (options.layers - 1)
        self.attention = nn.Sequential(*(layer(size, options, generator) for size in inputs))
        self.residual = linear(dim, width, generator, bias=False) if residual else None
        self.output = linear(fields * width, 1, generator, bias=False)
        self.deep: nn.Module | None = None
        if options.deep:
            self.deep = MLP(fields * dim, shape, generator)

    def forward(self, embeddings: Tensor, dense: Tensor) -> Tensor:
        """Logits `[batch]` from embeddings `[batch, fields, dim]` and numbers `[batch, n]`."""
        fields = self.numbers(embeddings, dense)
        found = self.attention(fields)
        if self.residual is not None:
            found = found + self.residual(fields)
        if self.relu:
            found = torch.relu(found)
        logits = self.output(found.flatten(1)).squeeze(1)
        return logits if self.deep is None else logits + self.deep(fields.flatten(1))


class AutoInt(FieldAttention):
    """`FieldAttention` of `InteractingLayer` (eq. 9); there is no first-order term."""

    def __init__(
        self, shape: NetworkShape, generator: torch.Generator, options: AutoIntOptions
    ) -> None:
        super().__init__(shape, generator, options, InteractingLayer)
