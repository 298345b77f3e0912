"""A network of one's own, the field-weighted factorization machine (arXiv 1806.03514)."""

import torch
from torch import Tensor, nn

from stampede.models import NetworkShape, register


@register("fwfm", first_order=True)
class FwFM(nn.Module):
    """`sum_{i<j} r_ij <e_i, e_j>` with a weight r_ij for each pair of fields."""

    def __init__(self, shape: NetworkShape, generator: torch.Generator) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(shape.fields, shape.fields))

    def forward(self, embeddings: Tensor, dense: Tensor) -> Tensor:
        """Logits [batch] from embeddings [batch, fields, dim] and numbers [batch, n]."""
        products = embeddings @ embeddings.mT
        return (products * self.weight).triu(1).sum((1, 2))
