"""Rows outside of a batch take their steps later, several at a time.

The step of such a row, momentum and L2, depends on the row alone. So it can wait until the row is
looked up again. The result is the same, bit for bit, but the table passes through memory once in
many steps instead of once in each.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stampede.optim.lookup import Lookup
from stampede.optim.rules import Adam, step_constants
from stampede.optim.update_settings import UpdateSettings

# The most steps that a row may be behind: each step brings this fraction of the table up to
# date. It also bounds the time of a flush. A larger window saves no noticeable traffic.
WINDOW = 32
# A table with fewer rows stays in cache, so all of them are swept in each step.
FEWEST_ROWS = 1 << 16
# Sweeping costs as much as waiting if a table has some ten rows for each row of the batch
# (benchmarks/update_kernel.py --ids).
ROWS_A_TOUCHED_ROW = 10


class WaitingRows:
    """The step that each row of an array is at; subclasses have the kernels that replay steps.

    Args:
        settings, weights: of the array; `is_replayable` is true for the settings.
        defers: whether rows may stay behind from one step to the next.
        known_late: how many steps later it may turn out that a step was not taken.
    """

    def __init__(
        self, settings: UpdateSettings, weights: Tensor, *, defers: bool, known_late: int = 0
    ) -> None:
        rows, device = len(weights), weights.device
        self._settings = settings
        self.defers = defers and rows >= FEWEST_ROWS
        # The step that each row is at; whether any may be behind the newest step.
        self.last = torch.zeros(rows, dtype=torch.int32, device=device)
        self.behind = False
        # Constants of the newest steps (`step_constants`): entry `k` belongs to step
        # `first + 1 + k`. Room for two windows, so that it is rarely moved.
        self._window = WINDOW + known_late
        self.steps = torch.empty(2 * self._window, 3, device=device)
        # The earliest step that a row may be at, and the newest.
        self.first = self.now = 0

    def replay_range(self, first_row: int, stop_row: int) -> None:
        """Bring neighbouring rows to step `now`."""
        raise NotImplementedError

    def replay_lookup(self, lookup: Lookup) -> None:
        """Bring the rows of a lookup to step `now`."""
        raise NotImplementedError

    def set_step(self, step: int) -> None:
        """Set the step of the array; it differs only after its state was loaded."""
        if step != self.now:
            self.all_are_at(step)

    def all_are_at(self, step: int) -> None:
        """Note that all rows have taken the steps up to `step`."""
        self.last.fill_(step)
        self.first = self.now = step
        self.behind = False

    def rewind(self, step: int) -> None:
        """Note that no row has taken the steps after `step`."""
        self.now = step
        self.behind = True

    def catch_up(self, lookup: Lookup) -> None:
        """Bring the rows of a lookup up to date."""
        if self.behind:
            self.replay_lookup(lookup)

    def flush(self) -> None:
        """Bring all rows up to date."""
        if self.behind:
            self.replay_range(0, len(self.last))
            self.behind = False

    def begin_step(self, lr: float, step: int) -> Tensor:
        """Begin a step, for the batch's rows; returns its constants, `[1, 3]`."""
        self.set_step(step - 1)
        if self.now - self.first == len(self.steps):
            self.steps[: self._window] = self.steps[self._window :].clone()
            self.first += self._window
        position, settings = self.now - self.first, self._settings
        self.now += 1
        # A number goes to the device without waiting; a tensor would be copied.
        constants = step_constants(settings.rule, lr, self.now, settings.weight_decay)
        for place, value in enumerate(constants):
            self.steps[position, place].fill_(value)
        return self.steps[position : position + 1]

    def end_step(self, touched: int | None) -> None:
        """Step rows outside of the batch: some, so that each waits for `WINDOW` steps at most.

        All if the batch holds many rows; `touched` is None where only the device knows how many.
        """
        self.behind = True
        rows = len(self.last)
        if not self.defers or (touched is not None and ROWS_A_TOUCHED_ROW * touched >= rows):
            self.flush()
        else:
            # A function of the step, so that undone steps change nothing.
            size = -(-rows // WINDOW)
            first = self.now % WINDOW * size
            if first < rows:
                self.replay_range(first, min(first + size, rows))


def is_replayable(settings: UpdateSettings) -> bool:
    """Whether rows outside of a batch take Adam steps that depend on the row alone."""
    return (
        type(settings.rule) is Adam
        and settings.moves_untouched_rows
        and not settings.needs_all_rows
    )
