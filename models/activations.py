# pyright: basic
"""Activations of hidden layers besides ReLU, with C++ kernels in training on a CPU."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn

from stampede.models import cpu
from stampede.models.batch_norm import GlobalBatchNorm, mean_over_ranks
from stampede.models.mlp import HiddenLayers
from stampede.models.options import Activation

_OPS = torch.ops.stampede_dense


class PReLU(nn.PReLU):
    """`nn.PReLU` with a slope for each column."""

    def forward(self, input: Tensor) -> Tensor:
        """`[n, width]` from `[n, width]`."""
        if cpu.trains_in_float32(input, self.weight):
            return _PReLU.apply(input, self.weight)
        return super().forward(input)


class Dice(nn.Module):
    """`p * x + (1 - p) * alpha * x` with `p = sigmoid((x - mean) / sqrt(variance + eps))`.

    Of DIN (arXiv 1706.06978, eq. 3), whose eps it has. Mean and variance of each column are over
    all rows of the global batch: samples, or in a unit of attention the ids of their histories.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm: nn.Module = nn.BatchNorm1d(width, eps=1e-8, affine=False)
        self.alpha = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        """`[n, width]` from `[n, width]`."""
        norm = self.norm
        if (
            isinstance(norm, GlobalBatchNorm)
            and norm.training
            and cpu.trains_in_float32(x, self.alpha)
        ):
            return _Dice.apply(x, self.alpha, *norm.of_batch(x), norm.eps, norm.ranks)
        share = torch.sigmoid(norm(x))
        return x * (share + (1 - share) * self.alpha)


class _PReLU(torch.autograd.Function):
    """PReLU in torch, whose backward pass is C++."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, alpha: Tensor) -> Tensor:
        x = x.contiguous()
        ctx.save_for_backward(x, alpha)
        return torch.prelu(x, alpha)

    @staticmethod
    @cpu.no_double_backward
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return _OPS.prelu_backward(grad.contiguous(), *ctx.saved_tensors)


class _Dice(torch.autograd.Function):
    """Dice in C++, with the statistics of a batch."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        alpha: Tensor,
        mean: Tensor,
        variance: Tensor,
        count: Tensor,
        eps: float,
        ranks: int,
    ) -> Tensor:
        x, ctx.ranks = x.contiguous(), ranks
        given = x, mean, (variance + eps).rsqrt(), alpha
        ctx.save_for_backward(count, *given)
        return _OPS.dice(*given)

    @staticmethod
    @cpu.no_double_backward
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        count, *given = ctx.saved_tensors
        grad = grad.contiguous()
        sums = _OPS.dice_sums(grad, *given)
        means = mean_over_ranks(sums[:2], count, ctx.ranks)
        of_x = _OPS.dice_backward(grad, *given, means.float())
        return of_x, sums[2].clone(), *[None] * 5


_KINDS = {"prelu": PReLU, "dice": Dice}


def activate(hidden: HiddenLayers, activation: Activation) -> None:
    """Replace the ReLU of layers, which keep their normalization and dropout."""
    if activation == "relu":
        return
    layers: Any = hidden._mlp
    for layer in layers:
        found = layer._activation_fn
        parts = found.named_children() if isinstance(found, nn.Sequential) else [("", nn.ReLU())]
        # Of one name, whether the layer has a norm and dropout or not.
        layer._activation_fn = nn.Sequential(
            OrderedDict(
                ("activation", _KINDS[activation](layer._linear.out_features))
                if isinstance(part, nn.ReLU)
                else (name, part)
                for name, part in parts
            )
        )
