# pyright: basic
"""Rows of histories, one per id, and DIN's attention over them (arXiv 1706.06978)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from stampede.models import cpu
from stampede.models.activations import Dice, activate
from stampede.models.mlp import hidden_layers, linear
from stampede.models.options import AttentionOptions


class History(Protocol):
    """A vector for each id of each sample.

    Attributes:
        values: `[ids, width]`, or with padding `[batch, most, width]`.
    """

    @property
    def values(self) -> Tensor:
        """Of each id."""
        ...

    def columns(self, first: int, last: int) -> History:
        """The same ids with some columns of their vectors."""
        ...

    def holding(self, values: Tensor) -> History:
        """The same ids with other vectors, shaped as `values` but for the width."""
        ...

    def each(self, of_samples: Tensor) -> Tensor:
        """`[batch, width]` as values of the ids, shaped as `values`."""
        ...

    def sums(self, values: Tensor) -> Tensor:
        """Sums over the ids of each sample, `[batch, width]`; zeros without ids."""
        ...

    def largest(self, values: Tensor) -> Tensor:
        """Maxima over the ids of each sample, `[batch, width]`; undefined without ids."""
        ...

    def padded(self) -> Padded:
        """The values in equally long rows."""
        ...


@dataclass(frozen=True)
class Jagged:
    """A history whose ids follow each other, sample by sample; see `History`.

    Attributes:
        lengths: `[batch]` integer, the ids of each sample.
    """

    values: Tensor
    lengths: Tensor

    def columns(self, first: int, last: int) -> Jagged:
        """See `History`."""
        return self.holding(self.values[:, first:last])

    def holding(self, values: Tensor) -> Jagged:
        """See `History`."""
        return Jagged(values, self.lengths)

    def each(self, of_samples: Tensor) -> Tensor:
        """See `History`."""
        return of_samples.repeat_interleave(self.lengths, 0, output_size=len(self.values))

    def sums(self, values: Tensor) -> Tensor:
        """See `History`."""
        return self._reduced(values, "sum", 0.0)

    def largest(self, values: Tensor) -> Tensor:
        """See `History`."""
        return self._reduced(values, "max", -1e30)

    def padded(self) -> Padded:
        """See `History`."""
        most = max(int(self.lengths.max()), 1) if len(self.lengths) else 1
        values = self.values.new_zeros(len(self.lengths), most, self.values.shape[1])
        is_id = torch.arange(most, device=self.lengths.device) < self.lengths.unsqueeze(1)
        place = is_id.unsqueeze(2).expand_as(values)
        return Padded(values.masked_scatter(place, self.values), is_id)

    def _reduced(self, values: Tensor, how: str, initial: float) -> Tensor:
        if not len(self.lengths):
            return values  # segment_reduce fails without samples.
        return torch.segment_reduce(values, how, lengths=self.lengths, axis=0, initial=initial)

    def bounds(self, first: int, last: int) -> tuple[int, int]:
        """Where the ids of samples begin and end."""
        if first == 0 and last >= len(self.lengths):
            return 0, len(self.values)
        return int(self.lengths[:first].sum()), int(self.lengths[:last].sum())


@dataclass(frozen=True)
class Padded:
    """A history with as many places for each sample, as in exported programs; see `History`.

    Attributes:
        is_id: `[batch, most]` bool, which places hold ids.
    """

    values: Tensor
    is_id: Tensor

    def columns(self, first: int, last: int) -> Padded:
        """See `History`."""
        return self.holding(self.values[..., first:last])

    def holding(self, values: Tensor) -> Padded:
        """See `History`."""
        return Padded(values, self.is_id)

    def each(self, of_samples: Tensor) -> Tensor:
        """See `History`."""
        return of_samples.unsqueeze(1).expand(-1, self.values.shape[1], -1)

    def sums(self, values: Tensor) -> Tensor:
        """See `History`."""
        return (values * self.is_id.unsqueeze(2)).sum(1)

    def largest(self, values: Tensor) -> Tensor:
        """See `History`."""
        return values.masked_fill(~self.is_id.unsqueeze(2), -1e30).amax(1)

    def padded(self) -> Padded:
        """See `History`."""
        return self


Histories = Mapping[str, Jagged]


def tile(
    histories: Histories, first: int, last: int, grads: Mapping[str, Tensor] | None = None
) -> dict[str, Jagged]:
    """The histories of samples `first` up to `last`.

    Args:
        grads: by name, a tensor shaped as the values, to which backward adds their gradients.
    """
    found = {}
    for name, history in histories.items():
        begin, end = history.bounds(first, last)
        values = history.values[begin:end]
        # In fresh memory, as the rounding of products depends on where a slice lies.
        values = values.clone() if begin else values
        if grads is not None:
            values = values.detach().requires_grad_()
            values.grad = grads[name][begin:end]
        found[name] = Jagged(values, history.lengths[first:last])
    return found


def tiles(rows: Tensor, histories: Histories, size: int) -> Iterator[tuple[Tensor, Histories]]:
    """Looked-up rows and histories of stretches of `size` samples."""
    for first, part in zip(range(0, max(len(rows), 1), size), rows.split(size), strict=True):
        yield part, tile(histories, first, first + len(part))


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
