# pyright: basic
"""Batch norm over the samples of all ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from stampede.models import cpu


class GlobalBatchNorm(nn.BatchNorm1d):
    """`nn.BatchNorm1d` whose mean and variance are those of the global batch.

    All ranks must call it equally often in training, some perhaps without a sample: each call waits
    for the others, and so does its backward pass. `nn.SyncBatchNorm` would do it on a GPU only. A
    batch of one sample, which torch refuses, gives the bias and leaves the running statistics.

    Attributes:
        ranks: that share a batch; 1: it is all here.
    """

    ranks = 1

    def forward(self, input: Tensor) -> Tensor:
        """The shape of the input, `[n, features]` or `[n, features, length]`."""
        if not self.training or (self.ranks == 1 and input.numel() > self.num_features):
            return super().forward(input)
        found: Any = self._of_all_ranks  # torch does not say what it makes of a method.
        return found(input)

    @torch.compiler.disable  # It waits for other ranks.
    def _of_all_ranks(self, input: Tensor) -> Tensor:
        self._check_input_dim(input)
        given = (*self.of_batch(input), self.weight, self.bias, self.eps, self.ranks)
        return _Normalized.apply(input, *given)

    def of_batch(self, input: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Mean and variance of each feature over all ranks, and the number of values, a scalar.

        Also moves the running statistics.
        """
        found = _statistics(input.detach(), self.ranks)
        self._note(*found)
        return found

    @torch.no_grad()
    def _note(self, mean: Tensor, variance: Tensor, count: Tensor) -> None:
        """Move the running statistics towards those of a batch."""
        moved, moved_variance, batches = (
            self.running_mean, self.running_var, self.num_batches_tracked
        )  # fmt: skip
        if moved is None or moved_variance is None or batches is None:
            return
        batches += 1
        share = 1 / batches if self.momentum is None else self.momentum
        # Reading the count from a GPU would wait.
        share = (count > 1).to(mean.dtype) * share
        unbiased = variance * (count / (count - 1).clamp(min=1))
        for running, found in ((moved, mean), (moved_variance, unbiased)):
            running.add_((share * (found - running)).to(running.dtype))


def use_global_batches(network: nn.Module) -> list[GlobalBatchNorm]:
    """Replace every `nn.BatchNorm1d` of a network, in place; returns those that are there now."""
    # By id: a module may be there several times.
    found: dict[int, GlobalBatchNorm] = {}
    for module in list(network.modules()):
        for name, child in list(module._modules.items()):
            if type(child) is nn.BatchNorm1d and child.track_running_stats:
                if id(child) not in found:
                    found[id(child)] = _like(child)
                setattr(module, name, found[id(child)])
    return list(found.values())


def _like(norm: nn.BatchNorm1d) -> GlobalBatchNorm:
    copied = GlobalBatchNorm(norm.num_features, norm.eps, norm.momentum, norm.affine)
    copied.load_state_dict(norm.state_dict(), assign=True)
    return copied.train(norm.training)


def _statistics(values: Tensor, ranks: int) -> tuple[Tensor, Tensor, Tensor]:
    dtype = torch.promote_types(values.dtype, torch.float32)
    features = values.shape[1]
    count = values.numel() // max(features, 1)
    # Without samples they are NaN.
    of_rank = values.new_zeros(2 * features + 1, dtype=torch.float64)
    if count:
        values, along = values.to(dtype), _all_but_features(values)
        if values.device.type == "cpu":
            # Ten times as fast.
            mean, variance = torch.batch_norm_update_stats(values, None, None, 0.0)
        else:
            variance, mean = torch.var_mean(values, along, correction=0)
        of_rank = torch.cat([mean.double(), variance.double() * count, of_rank[:1] + count])
    of_ranks = of_rank
    if ranks > 1:
        of_ranks = of_rank.new_empty(ranks * len(of_rank))
        dist.all_gather_into_tensor(of_ranks, of_rank)
    means, squares, counts = of_ranks.view(-1, len(of_rank)).split([features, features, 1], 1)
    total = counts.sum()
    mean = (counts * means).sum(0) / total.clamp(min=1)
    # Squares are about the means of the ranks (Chan et al., 1983, eq. 2.1).
    squares = (squares + counts * (means - mean).square()).sum(0)
    return mean.to(dtype), (squares / total.clamp(min=1)).to(dtype), total


class _Normalized(torch.autograd.Function):
    """`(x - mean) / sqrt(variance + eps) * weight + bias`; backward also through the statistics."""

    @staticmethod
    def forward(
        ctx: Any,
        values: Tensor,
        mean: Tensor,
        variance: Tensor,
        count: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        ranks: int,
    ) -> Tensor:
        ctx.save_for_backward(values, mean, (variance + eps).rsqrt(), count, weight)
        ctx.ranks = ranks
        return functional.batch_norm(values, mean, variance, weight, bias, False, 0.0, eps)

    @staticmethod
    @cpu.no_double_backward
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        values, mean, scale, count, weight = ctx.saved_tensors
        along = _all_but_features(values)
        shape = [-1, *[1] * (values.dim() - 2)]
        normal = (values - mean.view(shape)) * scale.view(shape)
        sums = torch.stack([grad.sum(along, dtype=mean.dtype), (grad * normal).sum(along)])
        of_bias, of_weight = sums
        of_mean, of_scale = mean_over_ranks(sums, count, ctx.ranks)
        factor = scale if weight is None else scale * weight
        inner = grad - of_mean.view(shape) - normal * of_scale.view(shape)
        of_values = (factor.view(shape) * inner).to(values.dtype)
        if weight is None:
            return of_values, *[None] * 7
        return of_values, None, None, None, of_weight, of_bias, None, None


def mean_over_ranks(sums: Tensor, count: Tensor, ranks: int) -> Tensor:
    """The ranks' sums, added up and divided by the number of values."""
    sums = sums.clone()
    if ranks > 1:
        dist.all_reduce(sums)
    return sums / count.clamp(min=1)


def _all_but_features(values: Tensor) -> list[int]:
    return [0, *range(2, values.dim())]
