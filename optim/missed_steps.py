"""Rows that are not in a batch take their steps later, several at a time, while in registers.

The step of such a row, momentum and L2, is a function of the row alone. So it can be made up for
when the row is next looked up: what is computed is the same, bit for bit, but the table passes
through memory once in many steps instead of in every one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias, TypeVar

import torch
from torch import Tensor

from stampede.optim import native
from stampede.optim.lookup import Lookup
from stampede.optim.native import replay
from stampede.optim.nonfinite import LATE, NonFiniteFlag
from stampede.optim.rules import Adam
from stampede.optim.rules.adam import step_constants
from stampede.optim.settings import UpdateSettings
from stampede.optim.step_history import StepHistory
from stampede.optim.table_array import TableArray

# No row is ever further behind: each step brings so large a part of the table up to date. It
# bounds the time of a flush, too. Beyond, the traffic saved no longer shows.
WINDOW = 32
# Below so many rows a sweep of all of them in each step stays in cache.
FEWEST_ROWS = 1 << 16
# To sweep them costs as much as to let them wait where a table has some ten rows for each of the
# batch (benchmarks/waiting_rows.py).
ROWS_A_TOUCHED_ROW = 10

T = TypeVar("T")
# Is given the constants of a step, `[1, 3]`, the step that each row is at or None, and its number.
StepKernel: TypeAlias = Callable[[Tensor, Tensor | None, int], T]


class MissedSteps:
    """Which step each row of an array is at, and how it takes those it has missed.

    Args:
        array: whose rows; `can_miss_steps` is true for it, or the Triton kernels can update it.
        defers: whether rows may stay behind from one step to the next. Whoever reads the table
            must then call `catch_up` or `flush` before.
        flag: with it the steps are only queued on a GPU, where they are taken by the Triton
            kernels unless the flag is set; None for the C++ kernels.

    Attributes:
        last: `[rows]` int32, the step each row is at.
        behind: whether some row may be behind the newest step.
    """

    def __init__(
        self, array: TableArray, *, defers: bool, flag: NonFiniteFlag | None = None
    ) -> None:
        rows, device = len(array.weights), array.weights.device
        self.defers = defers and rows >= FEWEST_ROWS
        self.last = torch.zeros(rows, dtype=torch.int32, device=device)
        self.behind = False
        self._flag = flag
        # Until it is known that a step was not taken, others have begun.
        self._history = StepHistory(WINDOW if flag is None else WINDOW + LATE + 1, device)

    @property
    def is_queued(self) -> bool:
        """Whether the steps are taken by the Triton kernels."""
        return self._flag is not None

    @property
    def step(self) -> int:
        """Number of the newest step."""
        return self._history.now

    def set_step(self, step: int) -> None:
        """The array is at `step`: its state was loaded. Nothing is done if it is there anyway."""
        if step != self.step:
            self.all_are_at(step)

    def all_are_at(self, step: int) -> None:
        """All rows have taken the steps up to `step`."""
        self.last.fill_(step)
        self._history.reset(step)
        self.behind = False

    def rewind(self, step: int) -> None:
        """The steps after `step` were not taken by any row."""
        self._history.rewind(step)
        self.behind = True

    def catch_up(self, array: TableArray, lookup: Lookup) -> None:
        """Bring the rows of a lookup up to date."""
        if not self.behind:
            return
        if self._flag is None:
            with array.keeping_frozen_row():
                replay.replay_lookup_(array, self.last, lookup, self._history)
        else:
            from stampede.optim.triton import replay as queued

            queued.replay_lookup_(array, self.last, lookup, self._history, self._flag.tensor)

    def catch_up_rows(self, array: TableArray, rows: Tensor) -> None:
        """Bring rows `[n]`, int64, up to date."""
        one_table = torch.zeros(1, dtype=torch.int64, device=rows.device)
        # No offsets: each row is a bag.
        self.catch_up(array, Lookup(rows, rows.new_empty(0), one_table, len(array.weights)))

    def flush(self, array: TableArray) -> None:
        """Bring all rows up to date."""
        if self.behind:
            self._catch_up_range(array, range(len(array.weights)))
            self.behind = False

    def take_step(self, array: TableArray, lr: float, touched: int, kernel: StepKernel[T]) -> T:
        """Take the next step: the batch's rows now, the others at the latest in `WINDOW` steps.

        Args:
            lr: learning rate.
            touched: rows of the batch, which are up to date.
            kernel: takes their step.
        """
        found = kernel(self.begin_step(array, lr), self.last, self.step)
        self.end_step(array, is_swept=sweeps_all(touched, len(self.last)))
        return found

    def begin_step(self, array: TableArray, lr: float) -> Tensor:
        """Begin the next step, which the batch's rows are to take; returns its constants."""
        settings = array.settings
        return self._history.begin(
            step_constants(settings.rule, lr, self.step + 1, settings.weight_decay)
        )

    def end_step(self, array: TableArray, *, is_swept: bool) -> None:
        """Let rows that are not in the batch take steps.

        Args:
            is_swept: whether all of them do so at once, as where the batch holds many rows.
        """
        self.behind = True
        count = len(self.last)
        if not self.defers or is_swept:
            self.flush(array)
        else:
            # A function of the step, so that steps that are taken back change nothing.
            size = -(-count // WINDOW)
            first = self.step % WINDOW * size
            if first < count:
                self._catch_up_range(array, range(first, min(first + size, count)))

    def _catch_up_range(self, array: TableArray, rows: range) -> None:
        if self._flag is not None:
            from stampede.optim.triton import replay as queued

            queued.replay_range_(array, self.last, rows, self._history, self._flag.tensor)
            return
        with array.keeping_frozen_row():
            replay.replay_range_(array, self.last, rows, self._history)


def sweeps_all(touched: int, rows: int) -> bool:
    """Whether all rows take a step at once, as so many of them are in its batch."""
    return ROWS_A_TOUCHED_ROW * touched >= rows


def steps_by_kernel(array: TableArray) -> bool:
    """Whether a C++ kernel takes the step of the batch's rows, and `take_step_` is for the array.

    Other rows then do not move, or can take their steps later.
    """
    if array.missed is not None:
        return not array.missed.is_queued
    settings = array.settings
    return (
        type(settings.rule) is Adam
        and not settings.moves_untouched_rows
        and native.handles(array.weights)
    )


def take_step_(array: TableArray, lr: float, step: int, touched: int, kernel: StepKernel[T]) -> T:
    """The step of the batch's rows by a kernel, and of the others that are to take it now.

    Args:
        step: its number.
        lr, touched, kernel: see `MissedSteps.take_step`.
    """
    if array.missed is not None:
        array.missed.set_step(step - 1)
        return array.missed.take_step(array, lr, touched, kernel)
    settings = array.settings
    constants = torch.tensor([step_constants(settings.rule, lr, step, settings.weight_decay)])
    return kernel(constants, None, step)


def can_miss_steps(weights: Tensor, settings: UpdateSettings) -> bool:
    """Whether a missed step depends on its row alone, and the C++ kernels can replay it."""
    return is_replayable(settings) and native.handles(weights)


def is_replayable(settings: UpdateSettings) -> bool:
    """Whether rows that no batch holds take steps that depend on the row alone, by Adam."""
    return (
        type(settings.rule) is Adam
        and settings.moves_untouched_rows
        and not settings.needs_all_rows
        and not settings.clip.by_table
    )
