"""DCN (arXiv 1708.05123) and DCNv2 (arXiv 2008.13535): cross layers beside an MLP."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torchrec.modules.crossnet import CrossNet, LowRankMixtureCrossNet, VectorCrossNet

from stampede.models.mlp import glorot_normal_, hidden_layers, linear
from stampede.models.options import CrossOptions, DCNv2Options
from stampede.models.registry import NetworkShape


class CrossNetwork(nn.Module):
    """`<w, [cross(z), h(z)]>` of all embeddings and numbers z, with ReLU layers h.

    As in the authors' code, the model adds the first-order term.

    Args:
        cross: the cross layers, initialised; they map `[batch, inputs]` to the same shape.
        matrices: their weights with an L2 term of coefficient `l2`, without biases and gates.
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
        chosen = {id(matrix) for matrix in matrices}
        self._matrices = [name for name, p in cross.named_parameters() if id(p) in chosen]

    def l2_terms(self) -> list[tuple[nn.Parameter, float]]:
        """The cross layers' matrices with their coefficient."""
        return [(self.cross.get_parameter(name), self._l2) for name in self._matrices]

    def forward(self, embeddings: Tensor, dense: Tensor) -> Tensor:
        """Logits `[batch]` from embeddings `[batch, fields, dim]` and numbers `[batch, n]`."""
        inputs = torch.cat([embeddings.flatten(1), dense], 1)
        return self.output(torch.cat([self.cross(inputs), self.deep(inputs)], 1)).squeeze(1)


class DCN(CrossNetwork):
    """Cross layers `z_{l+1} = z_0 * <w_l, z_l> + b_l + z_l` (eq. 3) beside an MLP."""

    def __init__(
        self, shape: NetworkShape, generator: torch.Generator, options: CrossOptions
    ) -> None:
        cross = VectorCrossNet(shape.inputs, options.layers)
        for kernel in cross.kernels:
            glorot_normal_(kernel, generator)
        super().__init__(cross, list(cross.kernels), shape, generator, options.l2)


class MixtureCrossNet(LowRankMixtureCrossNet):
    """TorchRec's mixture of low-rank cross layers, with one product for the experts of a layer.

    TorchRec computes expert by expert, with several passes over `[batch, inputs]` for each. The
    gates of a layer add up to 1, so `sum_i gate_i (U_i h_i + b)` is one product of all `gate_i h_i`
    with all `U_i`, plus b.
    """

    def forward(self, input: Tensor) -> Tensor:
        """`[batch, inputs]` from `[batch, inputs]`."""
        x = input
        layers = zip(self.V_kernels, self.C_kernels, self.U_kernels, self.bias, strict=True)
        for v, c, u, bias in layers:
            experts, rank, _ = v.shape
            hidden = self._activation(x @ v.flatten(0, 1).T).unflatten(1, (experts, rank))
            hidden = (hidden.transpose(0, 1) @ c.transpose(1, 2)).transpose(0, 1)
            hidden = self._activation(hidden)
            if self.gates is not None:
                gates = torch.cat([gate.weight for gate in self.gates])
                hidden = hidden * torch.softmax(x @ gates.T, 1).unsqueeze(2)
            cross = hidden.flatten(1) @ u.transpose(1, 2).flatten(0, 1) + bias.T
            x = input * cross + x
        return x


class DCNv2(CrossNetwork):
    """Cross layers with matrices beside an MLP (section 3.2).

    `full`: `z_{l+1} = z_0 * (W_l z_l + b_l) + z_l`, * by elements (eq. 1).
    `mixture`: `z_{l+1} = sum_i softmax(G z_l)_i E_i(z_l) + z_l` with the experts
    `E_i(z) = z_0 * (U_i tanh(C_i tanh(V_i z)) + b_l)` (eq. 3); all layers share the gates G.
    """

    def __init__(
        self, shape: NetworkShape, generator: torch.Generator, options: DCNv2Options
    ) -> None:
        if options.cross == "full":
            cross = CrossNet(shape.inputs, options.layers)
            matrices = list(cross.kernels)
        else:
            cross = MixtureCrossNet(
                shape.inputs, options.layers, options.experts, options.rank, torch.tanh
            )
            matrices = [*cross.U_kernels, *cross.V_kernels, *cross.C_kernels]
            for gate in cross.gates or ():
                # Keras' default, which the authors' code keeps for the gates.
                nn.init.xavier_uniform_(gate.weight, generator=generator)
        for matrix in matrices:
            glorot_normal_(matrix, generator)
        super().__init__(cross, matrices, shape, generator, options.l2)
