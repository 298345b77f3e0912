"""Rows that are not in a batch take their steps later, several at a time, while in registers.

The step of such a row, momentum and L2, is a function of the row alone. So it can be made up for
when the row is next looked up: what is computed is the same, bit for bit, but the table passes
through memory once in many steps instead of in every one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stampede.optim import native
from stampede.optim.native import kernels
from stampede.optim.rules import Adam
from stampede.optim.rules.adam import step_constants
from stampede.optim.settings import UpdateSettings
from stampede.optim.table_array import TableArray

# No row is ever further behind: each step brings so large a part of the table up to date. It
# bounds the time of a flush, too. Beyond, the traffic saved no longer shows.
WINDOW = 32
# Below so many rows a sweep of all of them in each step stays in cache.
FEWEST_ROWS = 1 << 16
# A sweep costs 4.6 ns a row and a replayed step 2.5 ns, but 45 ns more for each row of the batch
# (benchmarks/update_kernel.py): where the batch holds a twentieth of the rows, a sweep is cheaper.
ROWS_A_TOUCHED_ROW = 20


class MissedSteps:
    """Which step each row of an array is at, and how it takes those it has missed.

    Args:
        array: whose rows; `can_miss_steps` is true for it.
        defers: whether rows may stay behind from one step to the next. Whoever reads the table
            must then call `catch_up` or `flush` before.

    Attributes:
        step: number of the newest step.
        behind: whether some row may be behind it.
    """

    def __init__(self, array: TableArray, *, defers: bool) -> None:
        rows, device = len(array.weights), array.weights.device
        self.defers = defers and rows >= FEWEST_ROWS
        self.step = 0
        self.behind = False
        self._last = torch.zeros(rows, dtype=torch.int32, device=device)
        # Constants of the steps after `_first`; room for two windows, so that it is seldom moved.
        self._steps = torch.empty(2 * WINDOW, 3)
        self._first = 0
        self._next_row = 0

    def set_step(self, step: int) -> None:
        """The array is at `step`: its state was loaded. Nothing is done if it is there anyway."""
        if step != self.step:
            self._last.fill_(step)
            self.step = self._first = step
            self.behind = False

    def catch_up(self, array: TableArray, ids: Tensor, offsets: Tensor, first_rows: Tensor) -> None:
        """Bring the rows of a lookup up to date; see `kernels.sum_lookup` for the arguments."""
        if self.behind:
            kernels.catch_up_lookup_(
                *_tensors(array), self._last, ids, offsets, first_rows, *self._missed(array)
            )

    def catch_up_rows(self, array: TableArray, rows: Tensor) -> None:
        """Bring rows `[n]`, int64, up to date."""
        one_table = torch.zeros(1, dtype=torch.int64)
        self.catch_up(array, rows, rows.new_empty(0), one_table)

    def flush(self, array: TableArray) -> None:
        """Bring all rows up to date."""
        if self.behind:
            self._catch_up_range(array, range(len(array.weights)))
            self.behind = False

    def take_step(
        self, array: TableArray, lr: float, rows: Tensor, grads: Tensor, factor: Tensor | None
    ) -> None:
        """Take the next step: the batch's rows now, the others at the latest in `WINDOW` steps.

        Args:
            lr: learning rate.
            rows: `[n]` rows of the batch, up to date.
            grads: `[n, dim]` gradients, L2 included.
            factor: `[n]` what their clipped columns are multiplied by; None for 1.
        """
        constants = self._begin_step(array, lr)
        kernels.adam_rows_(
            *_tensors(array),
            rows,
            grads,
            factor,
            array.local_width,
            constants,
            array.settings.rule.betas,
            self._last,
            self.step,
        )
        self.behind = True
        count = len(self._last)
        if not self.defers or ROWS_A_TOUCHED_ROW * len(rows) >= count:
            self.flush(array)
        elif count:
            stop = min(self._next_row + -(-count // WINDOW), count)
            self._catch_up_range(array, range(self._next_row, stop))
            self._next_row = stop % count

    def _begin_step(self, array: TableArray, lr: float) -> Tensor:
        """Note the constants of a step; returns them, `[1, 3]`."""
        if self.step - self._first == len(self._steps):
            self._steps[:WINDOW] = self._steps[WINDOW:].clone()
            self._first += WINDOW
        settings, position = array.settings, self.step - self._first
        self.step += 1
        constants = step_constants(settings.rule, lr, self.step, settings.weight_decay)
        self._steps[position] = torch.tensor(constants)
        return self._steps[position : position + 1]

    def _catch_up_range(self, array: TableArray, rows: range) -> None:
        frozen = array.frozen_row
        kept = [] if frozen is None else [whole[frozen].clone() for whole in array.all_tensors()]
        kernels.catch_up_range_(*_tensors(array), self._last, rows, *self._missed(array))
        for whole, row in zip(array.all_tensors(), kept, strict=False):
            whole[frozen] = row

    def _missed(self, array: TableArray) -> tuple[Tensor, int, int, tuple[float, float], float]:
        settings = array.settings
        return self._steps, self._first, self.step, settings.rule.betas, settings.l2


def can_step_alone(array: TableArray) -> bool:
    """Whether only the batch's rows move, and there is a kernel for their step."""
    settings = array.settings
    return (
        type(settings.rule) is Adam
        and not settings.moves_untouched_rows
        and native.handles(array.weights)
    )


def step_alone_(
    array: TableArray, lr: float, step: int, rows: Tensor, grads: Tensor, factor: Tensor | None
) -> None:
    """The step of the batch's rows; see `MissedSteps.take_step` for the arguments."""
    settings = array.settings
    constants = torch.tensor([step_constants(settings.rule, lr, step, settings.weight_decay)])
    kernels.adam_rows_(
        *_tensors(array),
        rows,
        grads,
        factor,
        array.local_width,
        constants,
        settings.rule.betas,
        None,
        step,
    )


def can_miss_steps(weights: Tensor, settings: UpdateSettings) -> bool:
    """Whether a missed step depends on its row alone, and there are kernels that replay it."""
    return (
        type(settings.rule) is Adam
        and settings.moves_untouched_rows
        and not settings.needs_all_rows
        and not settings.clip.by_table
        and native.handles(weights)
    )


def _tensors(array: TableArray) -> tuple[Tensor, Tensor, Tensor]:
    return array.weights, array.states["exp_avg"], array.states["exp_avg_sq"]
