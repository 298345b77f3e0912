"""Cross layers beside an MLP: what DCN and DCNv2 have in common."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from stampede.models.mlp import hidden_layers, linear
from stampede.models.registry import NetworkShape


class CrossNetwork(nn.Module):
    """`<w, [cross(z), h(z)]>` of all embeddings and numbers z, with ReLU layers h.

    Args:
        cross: the cross layers, initialised; they map `[batch, inputs]` to the same shape.
        matrices: their weights that have an L2 term, without biases and gates.
        shape: what comes in, and the widths of h.
        generator: source of the initial weights.
        l2: coefficient of the L2 term.
    """

    def __init__(
        self,
        cross: nn.Module,
        matrices: Sequence[nn.Parameter],
        shape: NetworkShape,
        generator: torch.Generator,
        l2: float,
    ) -> None:
        super().__init__()
        self.cross = cross
        self.deep = hidden_layers(
            shape.inputs, shape.hidden, generator, shape.dropout, shape.normalization
        )
        self.output = linear(shape.inputs + shape.hidden[-1], 1, generator, bias=False)
        self._l2 = l2
        self._matrices = [name for name, p in cross.named_parameters() if _is_one_of(p, matrices)]

    def l2_terms(self) -> list[tuple[nn.Parameter, float]]:
        """The cross layers' matrices with their coefficient."""
        return [(self.cross.get_parameter(name), self._l2) for name in self._matrices]

    def forward(self, embeddings: Tensor, dense: Tensor) -> Tensor:
        """Logits `[batch]` from embeddings `[batch, fields, dim]` and numbers `[batch, n]`."""
        inputs = torch.cat([embeddings.flatten(1), dense], 1)
        return self.output(torch.cat([self.cross(inputs), self.deep(inputs)], 1)).squeeze(1)


def _is_one_of(parameter: nn.Parameter, parameters: Sequence[nn.Parameter]) -> bool:
    return any(parameter is other for other in parameters)
