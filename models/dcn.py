"""DCN, the deep & cross network (arXiv 1708.05123)."""

from __future__ import annotations

import torch
from torchrec.modules.crossnet import VectorCrossNet

from stampede.models.cross import CrossNetwork
from stampede.models.mlp import glorot_normal_
from stampede.models.options import CrossOptions
from stampede.models.registry import NetworkShape


class DCN(CrossNetwork):
    """Cross layers `z_{l+1} = z_0 * <w_l, z_l> + b_l + z_l` (eq. 3) beside an MLP.

    z_0 are all embeddings and numbers. As in the authors' code, the model adds the first-order
    term. See `CrossNetwork` for the rest.

    Args:
        shape: what comes in, and the widths of the MLP.
        generator: source of the initial weights.
        options: number of cross layers, their L2.
    """

    def __init__(
        self, shape: NetworkShape, generator: torch.Generator, options: CrossOptions
    ) -> None:
        cross = VectorCrossNet(shape.inputs, options.layers)
        for kernel in cross.kernels:
            glorot_normal_(kernel, generator)
        super().__init__(cross, list(cross.kernels), shape, generator, options.l2)
