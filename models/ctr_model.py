"""A whole CTR model: embedding front, network, first-order term, global bias."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from stampede.models.embedding_front import EmbeddingFront
from stampede.models.mlp import glorot_normal_
from stampede.models.registry import NetworkShape, network


class CTRModel(nn.Module):
    """Logit of a click: `bias + first-order term + network(embeddings, numbers)`.

    The first-order term is `sum_f w_f[id] + <w, x>`: a weight per id, stored beside its embedding,
    and `number_weights` for the numbers where there are any.

    Args:
        name: registered name of the network.
        vocabulary_sizes: rows of each field's table, by field name.
        numbers: number of numeric inputs.
        dim: width of the embeddings.
        hidden: widths of the MLP's hidden layers.
        seed: seed of the dense layers' initial weights.
    """

    def __init__(
        self,
        name: str,
        vocabulary_sizes: Mapping[str, int],
        numbers: int,
        dim: int,
        hidden: Sequence[int],
        seed: int,
    ) -> None:
        super().__init__()
        registered = network(name)
        generator = torch.Generator().manual_seed(seed)
        self.front = EmbeddingFront(vocabulary_sizes, dim)
        shape = NetworkShape(len(vocabulary_sizes), dim, numbers, tuple(hidden))
        self.network = registered.build(shape, generator)
        self.bias = nn.Parameter(torch.zeros(1))
        self.number_weights: nn.Linear | None = None
        self.first_order = registered.first_order
        if registered.first_order and numbers:
            self.number_weights = nn.Linear(numbers, 1, bias=False)
            glorot_normal_(self.number_weights.weight, generator)

    def forward(self, sparse: KeyedJaggedTensor, dense: Tensor) -> Tensor:
        """Logits `[batch]` from ids and numbers `[batch, numbers]`."""
        return self.logits(self.front.lookup(sparse), dense)

    def logits(self, rows: Tensor, dense: Tensor) -> Tensor:
        """Logits `[batch]` from looked-up rows, see `EmbeddingFront.lookup`, and numbers.

        A sample's logit depends on that sample alone.
        """
        embeddings, id_weights = self.front.split(rows)
        logits = self.network(embeddings, dense) + self.bias
        if self.first_order:
            logits = logits + id_weights.sum(1)
        if self.number_weights is not None:
            logits = logits + self.number_weights(dense).squeeze(1)
        return logits
