# pyright: basic
"""DIN's attention unit: a sample's item attends to the ids of its history (arXiv 1706.06978)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from stampede.models import cpu
from stampede.models.activations import Dice, activate
from stampede.models.histories import History, Jagged
from stampede.models.mlp import hidden_layers, linear
from stampede.models.options import AttentionOptions


class TargetAttention(nn.Module):
    """DIN's local activation unit: the sum of a history's rows, each times its weight.

    The weight is `MLP([q, k, q - k, q * k])` of the query's embedding q and the id's k. By default
    weights are not normalised, as in the paper, so that their sum tells the strength of a taste.
    """

    def __init__(self, dim: int, options: AttentionOptions, generator: torch.Generator) -> None:
        super().__init__()
        self.dim, self.softmax = dim, options.softmax
        self.hidden = hidden_layers(4 * dim, options.hidden, generator)
        activate(self.hidden, options.activation)
        self.output = linear(options.hidden[-1], 1, generator, bias=True)

    def forward(self, query: Tensor, history: History) -> Tensor:
        """`[batch, width]`, zeros for samples without ids.

        Args:
            query: `[batch, dim]`.
            history: rows of at least `dim` columns, the first of which are the embedding.
        """
        rows = history.values
        # With kernels, the lengths that they take.
        lengths = None
        if isinstance(history, Jagged) and cpu.trains_in_float32(rows, query):
            lengths, query, rows = history.lengths.long(), query.float(), rows.float()
        weights = self._weights(self._first(query, rows, history, lengths))
        weights = weights.view(*rows.shape[:-1], 1).to(rows.dtype)
        if self.softmax:
            weights = (weights - history.each(history.largest(weights.detach()))).exp()
            weights = weights / history.each(history.sums(weights))
        if lengths is not None:
            return _WeightedSums.apply(weights, rows, lengths)
        return history.sums(weights * rows)

    def _first(
        self, query: Tensor, rows: Tensor, history: History, lengths: Tensor | None
    ) -> Tensor:
        """The first layer's `[ids, hidden]`; its weights of q - k are added to those of q and k."""
        layers: Any = self.hidden._mlp
        linear = layers[0]._linear
        of_query, of_key, of_difference, of_product = linear.weight.split(self.dim, 1)
        of_query, of_key = of_query + of_difference, of_key - of_difference
        if lengths is not None:
            # Autocast would round what the samples' ids share.
            with torch.autocast("cpu", enabled=False):
                of_sample = functional.linear(query, of_query, linear.bias)
            return _FirstLayer.apply(of_sample, query, rows, of_key, of_product, lengths)
        keys, each = rows[..., : self.dim], history.each(query)
        inputs = torch.cat([each, keys, each * keys], -1).flatten(0, -2)
        weight = torch.cat([of_query, of_key, of_product], 1)
        return functional.linear(inputs, weight, linear.bias)

    def _weights(self, found: Tensor) -> Tensor:
        """Weights `[ids, 1]` from what the first layer gives."""
        layers: Any = self.hidden._mlp
        first, *others = layers
        for layer in others:
            found = layer._linear(first._activation_fn(found))
            first = layer
        last = first._activation_fn
        dice = getattr(last, "activation", None)
        if isinstance(dice, Dice):
            return dice(found, self.output)
        return self.output(last(found))


class _FirstLayer(torch.autograd.Function):
    """The unit's first layer in C++, `[ids, hidden]`, with a matrix for each sample's ids."""

    @staticmethod
    def forward(ctx: Any, of_sample: Tensor, *given: Tensor) -> Tensor:
        given = tuple(one.contiguous() for one in given)
        ctx.save_for_backward(*given)
        return torch.ops.stampede_dense.first_layer(of_sample.contiguous(), *given)

    @staticmethod
    @cpu.no_double_backward
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        operator = torch.ops.stampede_dense.first_layer_backward
        return *operator(grad.float().contiguous(), *ctx.saved_tensors), None


class _WeightedSums(torch.autograd.Function):
    """Sums of weighted rows in C++, `[batch, width]`."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, rows: Tensor, lengths: Tensor) -> Tensor:
        given = weights.contiguous(), rows.contiguous(), lengths.contiguous()
        ctx.save_for_backward(*given)
        return torch.ops.stampede_dense.weighted_sums(*given)

    @staticmethod
    @cpu.no_double_backward
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        operator = torch.ops.stampede_dense.weighted_sums_backward
        return *operator(grad.contiguous(), *ctx.saved_tensors), None
