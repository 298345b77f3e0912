"""xDeepFM (arXiv 1803.05170): a compressed interaction network beside an MLP."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from stampede.models.mlp import MLP, linear
from stampede.models.options import XDeepFMOptions
from stampede.models.registry import NetworkShape


class CIN(nn.Module):
    """Compressed interactions: `x^k_h = sum_ij W^{k,h}_ij (x^{k-1}_i * x^0_j)` (eq. 6).

    `*` is elementwise and x^0 are the embeddings; there is no bias and no activation. Every map of
    every layer is summed over its `dim` elements (eq. 7).
    """

    def __init__(self, fields: int, maps: Sequence[int], generator: torch.Generator) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            linear(before * fields, after, generator, bias=False)
            for before, after in pairwise([fields, *maps])
        )

    def forward(self, embeddings: Tensor) -> Tensor:
        """`[batch, sum(maps)]` from embeddings `[batch, fields, dim]`."""
        # With the elements of the embeddings first, a layer is one matrix product.
        first = maps = embeddings.transpose(1, 2).contiguous()
        sums = []
        for layer in self.layers:
            maps = layer((maps.unsqueeze(3) * first.unsqueeze(2)).flatten(2))
            sums.append(maps.sum(1))
        return torch.cat(sums, 1)


class XDeepFM(nn.Module):
    """`<w, CIN(e_1 .. e_F)> + MLP([e_1 .. e_F, x])` (eq. 9).

    The first-order term is the model's.
    """

    def __init__(
        self, shape: NetworkShape, generator: torch.Generator, options: XDeepFMOptions
    ) -> None:
        super().__init__()
        self.cin = CIN(shape.fields, options.cin, generator)
        self.output = linear(sum(options.cin), 1, generator, bias=False)
        self.mlp = MLP(shape.inputs, shape, generator)

    def forward(self, embeddings: Tensor, dense: Tensor) -> Tensor:
        """Logits `[batch]` from embeddings `[batch, fields, dim]` and numbers `[batch, n]`."""
        deep = self.mlp(torch.cat([embeddings.flatten(1), dense], 1))
        return self.output(self.cin(embeddings)).squeeze(1) + deep
