"""Missed steps, replayed by the C++ kernels."""

from __future__ import annotations

from torch import Tensor

from stampede.optim.lookup import Lookup
from stampede.optim.native import kernels
from stampede.optim.step_history import StepHistory
from stampede.optim.table_array import TableArray


def replay_range_(array: TableArray, last: Tensor, rows: range, history: StepHistory) -> None:
    """Bring neighbouring rows of an array of Adam's up to date.

    Args:
        last: `[rows of the array]` int32, the step each row is at.
        rows: which ones.
        history: the steps.
    """
    kernels.catch_up_range_(*array.adam_tensors(), last, rows, *_steps(array, history))


def replay_lookup_(array: TableArray, last: Tensor, lookup: Lookup, history: StepHistory) -> None:
    """Bring the rows of a lookup up to date; see `replay_range_`."""
    kernels.catch_up_lookup_(
        *array.adam_tensors(),
        last,
        lookup.indices,
        lookup.offsets,
        lookup.first_rows,
        *_steps(array, history),
    )


def _steps(
    array: TableArray, history: StepHistory
) -> tuple[Tensor, int, int, tuple[float, float], float]:
    settings = array.settings
    return history.constants, history.first, history.now, settings.rule.betas, settings.l2
