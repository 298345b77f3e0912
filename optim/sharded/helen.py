"""Helen in sharded tables: the first backward pass moves the rows, the second updates them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from stampede.optim.backends.torch import PendingUpdate
from stampede.optim.nonfinite import NonFiniteGradientError
from stampede.optim.rows import RowGradients
from stampede.optim.settings import HelenSettings
from stampede.optim.sharded.reduction import CollectionGroups
from stampede.optim.table_array import TableArray


class FirstPass(NamedTuple):
    """What the first pass leaves of one array."""

    array: TableArray
    batch: RowGradients  # Its gradients, L2 not included.
    weights: Tensor  # `[n, dim]` of the batch's rows before they were moved.
    decay_factor: Tensor | None  # See `PendingUpdate.swept_decay_factor`.


class HelenPasses:
    """Alternates a first pass, which moves the rows, and a second, which updates them."""

    def __init__(self) -> None:
        # By table, as in `TableShard.table`.
        self.settings: dict[str, HelenSettings] = {}
        # What the first pass left of each array; None before it.
        self.first: list[FirstPass] | None = None

    @torch.no_grad()
    def first_pass(
        self, updates: Sequence[PendingUpdate], reductions: Sequence[CollectionGroups]
    ) -> None:
        """Move the rows of the batch towards a higher loss.

        Raises:
            NonFiniteGradientError: a gradient is not finite; no table was changed.
        """
        taken = [update.array.weights[update.batch.rows] for update in updates]
        grads = [
            torch.add(update.batch.grads, weights, alpha=2.0 * self._of(update).l2)
            for update, weights in zip(updates, taken, strict=True)
        ]
        # Of this rank, then of all: squared gradient norm and largest count, by table.
        squares: dict[str, Tensor] = {}
        counts: dict[str, Tensor] = {}
        for update, weights, grad in zip(updates, taken, grads, strict=True):
            array, settings, columns = update.array, self._of(update), update.array.local_width
            decay = (2.0 * settings.l2) ** 2
            own = grad[:, :columns].double().square().sum(1)
            absent = -decay * weights[:, :columns].double().square().sum(1)
            places = zip(
                array.shards, pairwise(update.bounds()), pairwise(array.starts), strict=True
            )
            for shard, (first, stop), whole in places:
                total = own[first:stop].sum()
                if settings.l2 and settings.rows == "all":
                    every = array.weights[slice(*whole), :columns].double()
                    total = total + decay * every.square().sum()
                    total = total + absent[first:stop].sum()
                zero = torch.zeros_like(total)
                most = update.batch.counts[first:stop].double()
                most = most.max() if most.numel() else zero
                squares[shard.table] = squares.get(shard.table, zero) + total * shard.counted
                counts[shard.table] = torch.maximum(counts.get(shard.table, zero), most)
        for reduction in reductions:
            reduction.reduce_helen(squares, counts)
        if not all(bool(torch.isfinite(square)) for square in squares.values()):
            raise NonFiniteGradientError(
                "the gradient of an embedding row is not finite; no table of its collection was "
                "changed"
            )
        self.first = []
        for update, weights, grad in zip(updates, taken, grads, strict=True):
            array, batch, settings = update.array, update.batch, self._of(update)
            moved, columns = weights.clone(), array.local_width
            norms = torch.stack([squares[shard.table].sqrt() for shard in array.shards])
            places = zip(array.shards, pairwise(update.bounds()), norms, strict=True)
            for shard, (first, stop), norm in places:
                moved[first:stop, :columns] += settings.perturbation(
                    grad[first:stop, :columns], batch.counts[first:stop], norm, counts[shard.table]
                )
            array.weights.index_copy_(0, batch.rows, moved)
            self.first.append(FirstPass(array, batch, weights, settings.swept_decay_factor(norms)))

    @torch.no_grad()
    def second_pass(
        self, updates: Sequence[PendingUpdate], reductions: Sequence[CollectionGroups]
    ) -> list[PendingUpdate]:
        """Move the rows back; return the ordinary updates that remain.

        The clipped columns take the second gradient, with the L2 term of the moved weights; the
        others, first-order weights, were not moved and take the first.

        Raises:
            ValueError: on all ranks, if any rank looked up other rows than in the first pass. The
                rows are back where they were, and the next pass counts as a first one.
        """
        first, self.first = self.first, None
        same = len(first) == len(updates) and all(
            update.array is left.array and torch.equal(update.batch.rows, left.batch.rows)
            for update, left in zip(updates, first, strict=False)
        )
        moved = [left.array.weights[left.batch.rows] - left.weights for left in first]
        for left in first:
            left.array.weights.index_copy_(0, left.batch.rows, left.weights)
        # A list, not a generator: every rank must take part in every reduction.
        if any([reduction.any(not same) for reduction in reductions]):
            raise ValueError(
                "Helen: the second backward pass looked up other rows than the first; both must "
                "run on the same batch (an exception between the two skips the second). The "
                "tables are as before the first"
            )
        remaining = []
        for update, left, by in zip(updates, first, moved, strict=True):
            columns = update.array.local_width
            grads = torch.add(update.batch.grads, by, alpha=2.0 * self._of(update).l2)
            grads[:, columns:] = left.batch.grads[:, columns:]
            batch = update.batch._replace(grads=grads)
            remaining.append(replace(update, batch=batch, swept_decay_factor=left.decay_factor))
        return remaining

    def _of(self, update: PendingUpdate) -> HelenSettings:
        return self.settings[update.array.shards[0].table]
