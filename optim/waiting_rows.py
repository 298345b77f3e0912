"""Rows that are not in a batch take their steps later, several at a time.

The step of such a row, momentum and L2, is a function of the row alone. So it can be made up for
when the row is next looked up: what is computed is the same, bit for bit, but the table passes
through memory once in many steps instead of in every one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stampede.optim.lookup import Lookup
from stampede.optim.rules import Adam, step_constants
from stampede.optim.settings import UpdateSettings

# No row is ever further behind: each step brings so large a part of the table up to date. It
# bounds the time of a flush, too. Beyond, the traffic saved no longer shows.
WINDOW = 32
# Below so many rows a sweep of all of them in each step stays in cache.
FEWEST_ROWS = 1 << 16
# To sweep them costs as much as to let them wait where a table has some ten rows for each of the
# batch (benchmarks/waiting_rows.py).
ROWS_A_TOUCHED_ROW = 10


class WaitingRows:
    """Which step each row of an array is at; the kernels that replay steps are a subclass's.

    Args:
        settings: of the array; `is_replayable` is true for them.
        rows, device: of the array.
        defers: whether rows may stay behind from one step to the next. Whoever reads the table
            must then call `catch_up` or `flush` before.
        known_late: how many steps later it may become known that a step was not taken.

    Attributes:
        last: `[rows]` int32, the step each row is at.
        behind: whether some row may be behind the newest step.
        steps: `[many, 3]` float32, the constants of the newest steps (`step_constants`); entry `k`
            belongs to step `first + 1 + k`.
        first: no row is at an earlier step.
        now: number of the newest step.
    """

    def __init__(
        self,
        settings: UpdateSettings,
        rows: int,
        device: torch.device,
        *,
        defers: bool,
        known_late: int = 0,
    ) -> None:
        self._settings = settings
        self.defers = defers and rows >= FEWEST_ROWS
        self.last = torch.zeros(rows, dtype=torch.int32, device=device)
        self.behind = False
        self._window = WINDOW + known_late
        # Room for two windows, so that it is seldom moved.
        self.steps = torch.empty(2 * self._window, 3, device=device)
        self.first = self.now = 0

    def replay_range(self, first_row: int, stop_row: int) -> None:
        """Bring neighbouring rows to step `now`."""
        raise NotImplementedError

    def replay_lookup(self, lookup: Lookup) -> None:
        """Bring the rows of a lookup to step `now`."""
        raise NotImplementedError

    def set_step(self, step: int) -> None:
        """The array is at `step`. It is at another one only where its state was loaded."""
        if step != self.now:
            self.all_are_at(step)

    def all_are_at(self, step: int) -> None:
        """All rows have taken the steps up to `step`."""
        self.last.fill_(step)
        self.first = self.now = step
        self.behind = False

    def rewind(self, step: int) -> None:
        """The steps after `step` were not taken by any row."""
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

    def begin_step(self, lr: float) -> Tensor:
        """Begin the next step, which the batch's rows take; returns its constants, `[1, 3]`."""
        if self.now - self.first == len(self.steps):
            self.steps[: self._window] = self.steps[self._window :].clone()
            self.first += self._window
        position, settings = self.now - self.first, self._settings
        self.now += 1
        # A number is passed to a device without waiting for it; a tensor would be copied.
        constants = step_constants(settings.rule, lr, self.now, settings.weight_decay)
        for place, value in enumerate(constants):
            self.steps[position, place].fill_(value)
        return self.steps[position : position + 1]

    def end_step(self, *, is_swept: bool) -> None:
        """Let rows that are not in the batch take steps: at the latest in `WINDOW` steps.

        Args:
            is_swept: whether all of them do so at once, as where the batch holds many rows.
        """
        self.behind = True
        rows = len(self.last)
        if not self.defers or is_swept:
            self.flush()
        else:
            # A function of the step, so that steps that are taken back change nothing.
            size = -(-rows // WINDOW)
            first = self.now % WINDOW * size
            if first < rows:
                self.replay_range(first, min(first + size, rows))


def sweeps_all(touched: int, rows: int) -> bool:
    """Whether all rows take a step at once, as so many of them are in its batch."""
    return ROWS_A_TOUCHED_ROW * touched >= rows


def is_replayable(settings: UpdateSettings) -> bool:
    """Whether rows that no batch holds take steps that depend on the row alone, by Adam."""
    return (
        type(settings.rule) is Adam
        and settings.moves_untouched_rows
        and not settings.needs_all_rows
        and not settings.clip.by_table
    )
