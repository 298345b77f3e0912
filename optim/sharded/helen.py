"""Helen in sharded tables: the first backward pass moves the rows, the second updates them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from stampede.optim.backends.torch import PendingUpdate
from stampede.optim.nonfinite import NonFiniteGradientError
from stampede.optim.perturbation import HelenSettings, perturbation
from stampede.optim.rows import RowGradients
from stampede.optim.sharded.reduction import CollectionGroups
from stampede.optim.table_array import TableArray


@dataclass
class FirstPass:
    """What the first pass leaves of one array.

    Attributes:
        batch: its gradients, L2 not included.
        weights: `[n, dim]` of the batch's rows before they were moved.
        decay_factor: see `PendingUpdate.swept_decay_factor`.
    """

    array: TableArray
    batch: RowGradients
    weights: Tensor
    decay_factor: Tensor | None

    @torch.no_grad()
    def restore_(self) -> Tensor:
        """Move the rows back, bit for bit; return how far they had been moved."""
        rows = self.batch.rows
        moved = self.array.weights[rows] - self.weights
        self.array.weights.index_copy_(0, rows, self.weights)
        return moved


class HelenPasses:
    """Alternates a first pass, which moves the rows, and a second, which updates them.

    Attributes:
        settings: by table, as in `TableShard.table`.
        first: what the first pass left of each array; None before it.
    """

    def __init__(self) -> None:
        self.settings: dict[str, HelenSettings] = {}
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
            _measure(update, self._of(update), weights, grad, squares, counts)
        for reduction in reductions:
            reduction.reduce_helen(squares, counts)
        if not all(bool(torch.isfinite(square)) for square in squares.values()):
            raise NonFiniteGradientError(
                "the gradient of an embedding row is not finite; no table of its collection was "
                "changed"
            )
        self.first = []
        for update, weights, grad in zip(updates, taken, grads, strict=True):
            array, batch, setting = update.array, update.batch, self._of(update)
            moved, columns, bounds = weights.clone(), array.local_width, update.bounds()
            norms = torch.stack([squares[shard.table].sqrt() for shard in array.shards])
            for i, shard in enumerate(array.shards):
                rows = slice(bounds[i], bounds[i + 1])
                moved[rows, :columns] += perturbation(
                    grad[rows, :columns],
                    batch.counts[rows],
                    norms[i],
                    counts[shard.table],
                    setting.rho,
                    setting.bound,
                )
            array.weights.index_copy_(0, batch.rows, moved)
            decay_factor = setting.swept_decay_factor(norms)
            self.first.append(FirstPass(array, batch, weights, decay_factor))

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
        moved = [left.restore_() for left in first]
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


def _measure(
    update: PendingUpdate,
    settings: HelenSettings,
    taken: Tensor,
    grad: Tensor,
    squares: dict[str, Tensor],
    counts: dict[str, Tensor],
) -> None:
    """Add an array's squared gradient norm, and its largest count, to those of its tables."""
    array, columns = update.array, update.array.local_width
    bounds, starts = update.bounds(), array.starts
    own = grad[:, :columns].double().square().sum(1)
    absent = -((2.0 * settings.l2) ** 2) * taken[:, :columns].double().square().sum(1)
    for i, shard in enumerate(array.shards):
        rows = slice(bounds[i], bounds[i + 1])
        total = own[rows].sum()
        if settings.l2 and settings.rows == "all":
            whole = array.weights[starts[i] : starts[i + 1], :columns].double()
            total = total + (2.0 * settings.l2) ** 2 * whole.square().sum()
            total = total + absent[rows].sum()
        most = update.batch.counts[rows].double()
        most = most.max() if most.numel() else total.new_zeros(())
        zero = torch.zeros_like(total)
        squares[shard.table] = squares.get(shard.table, zero) + total * shard.counted
        counts[shard.table] = torch.maximum(counts.get(shard.table, zero), most)
