# pyright: basic
"""Rows of histories, one per id."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


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
        # Values elsewhere may be infinite.
        return values.masked_fill(self.is_id.logical_not().unsqueeze(2), 0.0).sum(1)

    def largest(self, values: Tensor) -> Tensor:
        """See `History`."""
        return values.masked_fill(self.is_id.logical_not().unsqueeze(2), -1e30).amax(1)

    def padded(self) -> Padded:
        """See `History`."""
        return self


def history(values: Tensor, places: Tensor) -> History:
    """A history by the lengths of its samples, or padded, by which places hold ids."""
    return Jagged(values, places) if places.ndim == 1 else Padded(values, places)


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
