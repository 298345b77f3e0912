"""Wukong (arXiv 2403.02545): stacked factorization machines, beside linear compressions."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from stampede.models.mlp import MLP, NumberEmbedding, glorot_normal_, hidden_layers, linear
from stampede.models.options import WukongOptions
from stampede.models.registry import NetworkShape


class WukongLayer(nn.Module):
    """`layer_norm([FMB(X), LCB(X)] + X)` of vectors X `[batch, inputs, dim]` (sec. 3.3).

    `FMB(X) = MLP(layer_norm(X X^T Y))`, reshaped to `fmb_features` vectors, with a learned Y
    `[inputs, rank]`, or `X X^T` itself without a rank. `LCB(X) = W X` are `lcb_features` vectors.
    If X has another number of vectors than the result, `W' X` takes its place in the sum.

    The paper's variant that computes Y of X is left out. The MLP ends with a ReLU and only its
    hidden layers drop out, as in FuxiCTR; the paper does not say.
    """

    def __init__(
        self,
        inputs: int,
        dim: int,
        options: WukongOptions,
        generator: torch.Generator,
        dropout: float,
    ) -> None:
        super().__init__()
        self.dim = dim
        self.projection: nn.Parameter | None = None
        if options.rank is not None:
            self.projection = nn.Parameter(
                glorot_normal_(torch.empty(inputs, options.rank), generator)
            )
        products = inputs * (inputs if options.rank is None else options.rank)
        self.products_norm = nn.LayerNorm(products)
        units = options.fmb_mlp_units
        self.mlp = nn.Sequential(
            hidden_layers(products, units, generator, dropout),
            hidden_layers(units[-1], [options.fmb_features * dim], generator),
        )
        self.compression = linear(inputs, options.lcb_features, generator, bias=False)
        outputs = options.fmb_features + options.lcb_features
        self.residual: nn.Module | None = None
        if inputs != outputs:
            self.residual = linear(inputs, outputs, generator, bias=False)
        self.norm = nn.LayerNorm(dim)

    def forward(self, vectors: Tensor) -> Tensor:
        """`[batch, fmb_features + lcb_features, dim]`."""
        turned = vectors.transpose(1, 2)
        # In this order the matrix of all pairs is never built.
        products = vectors @ (turned if self.projection is None else turned @ self.projection)
        products = self.products_norm(products.flatten(1))
        of_pairs = self.mlp(products).unflatten(1, (-1, self.dim))
        found = torch.cat([of_pairs, self.compression(turned).transpose(1, 2)], 1)
        if self.residual is not None:
            vectors = self.residual(turned).transpose(1, 2)
        return self.norm(found + vectors)


class BottomMLP(nn.Module):
    """Joins the embeddings with one vector `h(x)` of all numbers, with an MLP h (sec. 3.2)."""

    def __init__(self, numbers: int, widths: Sequence[int], generator: torch.Generator) -> None:
        super().__init__()
        self.mlp = hidden_layers(numbers, widths, generator)

    def forward(self, embeddings: Tensor, dense: Tensor) -> Tensor:
        """`[batch, fields + 1, dim]` from `[batch, fields, dim]` and `[batch, numbers]`."""
        return torch.cat([embeddings, self.mlp(dense).unsqueeze(1)], 1)


class Wukong(nn.Module):
    """`MLP(layer_l(.. layer_1(e_1 .. e_F, h(x))))` with an MLP h of all numbers x (sec. 3.1).

    With `bottom: null` each number is a vector instead, see `NumberEmbedding`, as in FuxiCTR. There
    is no first-order term. FuxiCTR's `num_wukong_layers`, `fmp_rank_k` and `mlp_hidden_units` are
    `layers`, `rank` and `model.hidden`. Its `net_dropout` is for the layers' MLPs alone,
    `model.dropout` for the last MLP too.
    """

    def __init__(
        self, shape: NetworkShape, generator: torch.Generator, options: WukongOptions
    ) -> None:
        super().__init__()
        if options.bottom is not None and shape.numbers:
            widths = [*options.bottom, shape.dim]
            self.numbers: nn.Module = BottomMLP(shape.numbers, widths, generator)
            vectors = shape.fields + 1
        else:
            self.numbers = NumberEmbedding(shape.numbers, shape.dim, generator)
            vectors = shape.fields + shape.numbers
        outputs = options.fmb_features + options.lcb_features
        self.layers = nn.Sequential(
            *(
                WukongLayer(
                    outputs if layer else vectors, shape.dim, options, generator, shape.dropout
                )
                for layer in range(options.layers)
            )
        )
        self.mlp = MLP(outputs * shape.dim, shape, generator)

    def forward(self, embeddings: Tensor, dense: Tensor) -> Tensor:
        """Logits `[batch]` from embeddings `[batch, fields, dim]` and numbers `[batch, n]`."""
        return self.mlp(self.layers(self.numbers(embeddings, dense)).flatten(1))
