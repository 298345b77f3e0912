"""MaskNet (arXiv 2102.07619): blocks that multiply their input by a mask made of the embeddings."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from stampede.models.mlp import MLP, NumberEmbedding, hidden_layers, linear
from stampede.models.options import MaskNetOptions
from stampede.models.registry import NetworkShape


class MaskBlock(nn.Module):
    """`relu(layer_norm(W (mask(z) * u)))` with `mask(z) = W_2 relu(W_1 z + b_1) + b_2` (eq. 3-10).

    Maps z `[batch, mask_inputs]`, all embeddings, and u `[batch, inputs]` to `[batch, outputs]`.
    The mask's hidden layer is `reduction` times as wide as u.
    """

    def __init__(
        self,
        mask_inputs: int,
        inputs: int,
        outputs: int,
        reduction: float,
        generator: torch.Generator,
    ) -> None:
        super().__init__()
        aggregated = max(1, int(inputs * reduction))
        self.mask = nn.Sequential(
            hidden_layers(mask_inputs, [aggregated], generator),
            linear(aggregated, inputs, generator, bias=True),
        )
        self.layer = linear(inputs, outputs, generator, bias=False)
        self.norm = nn.LayerNorm(outputs)

    def forward(self, embeddings: Tensor, inputs: Tensor) -> Tensor:
        """`[batch, outputs]` from z `[batch, mask_inputs]` and u `[batch, inputs]`."""
        return functional.relu(self.norm(self.layer(self.mask(embeddings) * inputs)))


class MaskNet(nn.Module):
    """`MLP([block_1(z, n) .. block_K(z, n)])`, or `<w, block_K(z, .. block_1(z, n))>`.

    z are all embeddings, numbers among them, see `NumberEmbedding`; n are the same, each normalized
    (layer norm with its own weights). There is no first-order term.
    """

    def __init__(
        self, shape: NetworkShape, generator: torch.Generator, options: MaskNetOptions
    ) -> None:
        super().__init__()
        fields = shape.fields + shape.numbers
        inputs = fields * shape.dim
        self.numbers = NumberEmbedding(shape.numbers, shape.dim, generator)
        self.norm_weight = nn.Parameter(torch.ones(fields, shape.dim))
        self.norm_bias = nn.Parameter(torch.zeros(fields, shape.dim))
        self.is_serial = options.structure == "serial"
        sizes = [(inputs, options.width)] * options.blocks
        if self.is_serial:
            sizes = list(pairwise([inputs, *shape.hidden]))
            # These blocks are the hidden layers; they already have a layer norm.
            self.dropout = nn.Dropout(shape.dropout)
        self.blocks = nn.ModuleList(
            MaskBlock(inputs, before, after, options.reduction, generator)
            for before, after in sizes
        )
        if self.is_serial:
            self.output: nn.Module = linear(shape.hidden[-1], 1, generator, bias=False)
        else:
            self.output = MLP(options.blocks * options.width, shape, generator)

    def forward(self, embeddings: Tensor, dense: Tensor) -> Tensor:
        """Logits `[batch]` from embeddings `[batch, fields, dim]` and numbers `[batch, n]`."""
        fields = self.numbers(embeddings, dense)
        normed = functional.layer_norm(fields, fields.shape[2:])
        inputs = (normed * self.norm_weight + self.norm_bias).flatten(1)
        fields = fields.flatten(1)
        if self.is_serial:
            for block in self.blocks:
                inputs = self.dropout(block(fields, inputs))
            return self.output(inputs).squeeze(1)
        return self.output(torch.cat([block(fields, inputs) for block in self.blocks], 1))
