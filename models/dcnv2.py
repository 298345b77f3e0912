"""DCNv2 (arXiv 2008.13535): cross layers of full rank, or mixtures of low-rank experts."""

from __future__ import annotations

import torch
from torch import nn
from torchrec.modules.crossnet import CrossNet, LowRankMixtureCrossNet

from stampede.models.cross import CrossNetwork
from stampede.models.mlp import glorot_normal_
from stampede.models.options import DCNv2Options
from stampede.models.registry import NetworkShape


class DCNv2(CrossNetwork):
    """Cross layers with matrices beside an MLP (section 3.2).

    `full`: `z_{l+1} = z_0 * (W_l z_l + b_l) + z_l`, * by elements (eq. 1).
    `mixture`: `z_{l+1} = sum_i softmax(G z_l)_i E_i(z_l) + z_l` with the experts
    `E_i(z) = z_0 * (U_i tanh(C_i tanh(V_i z)) + b_l)` (eq. 3); all layers share the gates G.

    z_0 are all embeddings and numbers. As in the authors' code, the model adds the first-order
    term. See `CrossNetwork` for the rest.

    Args:
        shape: what comes in, and the widths of the MLP.
        generator: source of the initial weights.
        options: kind and number of cross layers, their L2.
    """

    def __init__(
        self, shape: NetworkShape, generator: torch.Generator, options: DCNv2Options
    ) -> None:
        if options.cross == "full":
            cross = CrossNet(shape.inputs, options.layers)
            matrices = list(cross.kernels)
        else:
            cross = LowRankMixtureCrossNet(
                shape.inputs, options.layers, options.experts, options.rank, torch.tanh
            )
            matrices = [*cross.U_kernels, *cross.V_kernels, *cross.C_kernels]
            for gate in cross.gates or ():
                # Keras' default, with which the authors' code leaves the gates.
                nn.init.xavier_uniform_(gate.weight, generator=generator)
        for matrix in matrices:
            glorot_normal_(matrix, generator)
        super().__init__(cross, matrices, shape, generator, options.l2)
