"""The update of tables from the gradients of a batch's rows: L2, clip, step of the rule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from stampede.optim.lookup import LookedUpGradients
from stampede.optim.nonfinite import NonFiniteGradientError
from stampede.optim.rows import RowGradients
from stampede.optim.table_array import TableArray


class Backend(Protocol):
    """The kernels of an array of tables, as far as a step needs them."""

    array: TableArray

    def measure(self, update: PendingUpdate) -> Measured:
        """First half of a step: what may have to be added up over ranks, or be refused."""

    def step_(self, measured: Measured) -> Tensor:
        """Second half: clip and step the batch's rows, and step all others that are due.

        Returns:
            `[3]` int64 on the device, how many of the batch's rows were touched, clipped and
            skipped. A row in several column shards or copies is counted in the first one only.
        """


@dataclass
class PendingUpdate:
    """One array's share in a step, counted from 1."""

    backend: Backend
    # Gradients of the batch's rows, of the mean loss over the global batch; rows count from the
    # start of the array. Of one lookup they need not be summed if the update is queued on a GPU.
    batch: RowGradients | LookedUpGradients
    lr: float
    step: int

    @property
    def array(self) -> TableArray:
        """The array that is updated."""
        return self.backend.array


@dataclass
class Measured:
    """An update and the values of rows that its step needs.

    Values are a matrix `[3 + row states, n]` that can be summed over column shards: squared norm of
    the gradient over the clipped columns and over the others, squared norm of the weights over the
    clipped columns, row states.
    """

    update: PendingUpdate  # Its gradients include the L2 term, and will be overwritten.
    # Of the batch's rows; None if the step computes them in its own pass, with nothing to add up
    # or to refuse before it.
    values: Tensor | None
    # Of all rows, as if their gradient were the L2 term; None if the step needs none.
    everything: Tensor | None = None
    skipped: int = 0  # Rows skipped because their gradient is not finite.

    def factors(self) -> tuple[Tensor | None, Tensor | None]:
        """Factors of the clipped columns: of the batch's rows, of all others; None for 1."""
        array, counts = self.update.array, self.update.batch.counts
        clip, everything = array.settings.clip, self.everything
        if not clip.clips:
            return None, None
        factor = clip.factor(self.values[0], self.values[2], counts, array.width)
        if everything is None or not clip.may_clip_decay(array.settings.l2):
            return factor, None
        once = torch.ones_like(everything[0])
        return factor, clip.factor(everything[0], everything[2], once, array.width)

    def counts(self, clipped: Tensor | int) -> Tensor:
        """What `Backend.step_` returns, given how many of the batch's rows were clipped."""
        rows = self.update.batch.rows
        counts = rows.new_tensor([len(rows), 0, self.skipped])
        counts[1] = clipped
        return counts * self.update.array.counts_rows


class Reduction(Protocol):
    """What the ranks of a sharded collection tell each other, in the same order on all of them."""

    def sum_columns_(self, each: Sequence[tuple[TableArray, Tensor | None, Tensor]]) -> None:
        """Add up the values of rows over the column shards of their table, in place.

        Args:
            each: an array, the rows `[n]` (sorted; None for all), and their values `[k, n]`.
        """

    def refuses(self, found: bool) -> bool:
        """Whether any rank found a gradient that the settings do not allow."""


@torch.no_grad()
def update_(updates: Sequence[PendingUpdate], reductions: Sequence[Reduction] = ()) -> list[Tensor]:
    """One step of several arrays of tables, in place: all of them change, or none.

    No dense gradient of a table is made.

    Args:
        reductions: of the collections whose ranks tell each other something; of updates that are
            queued on a GPU, the queue.

    Returns:
        The counts of each array, see `Backend.step_`.

    Raises:
        NonFiniteGradientError: a gradient is not finite, and the settings do not allow it.
    """
    steps = [update.backend.measure(_without_frozen_row(update)) for update in updates]
    measured = [one for one in steps if one.values is not None]
    of_batch = [(one.update.array, one.update.batch.rows, one.values) for one in measured]
    of_all = [
        (one.update.array, None, one.everything) for one in measured if one.everything is not None
    ]
    for values in filter(None, (of_batch, of_all)):
        for reduction in reductions:
            reduction.sum_columns_(values)
    is_refused = _leave_out_nonfinite(measured)
    for reduction in reductions:
        is_refused = reduction.refuses(is_refused)
    if is_refused:
        raise NonFiniteGradientError(
            "the gradient of an embedding row is not finite; no table of its collection was "
            "changed (on_nonfinite='skip_row' would leave such rows out)"
        )
    return [one.update.backend.step_(one) for one in steps]


def _without_frozen_row(update: PendingUpdate) -> PendingUpdate:
    frozen, batch = update.array.frozen_row, update.batch
    return update if frozen is None else replace(update, batch=batch.where(batch.rows != frozen))


def _leave_out_nonfinite(steps: Sequence[Measured]) -> bool:
    """Skip rows with a NaN or an infinity; whether the settings of one forbid that.

    All column shards see the same sum.
    """
    finite = [torch.isfinite(one.values[0] + one.values[1]) for one in steps]
    bad = torch.stack([(~rows).sum() for rows in finite]).tolist() if finite else []
    is_refused = False
    for one, kept, count in zip(steps, finite, bad, strict=True):
        if count:
            one.skipped = count
            one.update = replace(one.update, batch=one.update.batch.where(kept))
            one.values = one.values[:, kept]
            is_refused |= one.update.array.settings.on_nonfinite == "error"
    return is_refused
