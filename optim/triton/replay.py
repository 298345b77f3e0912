"""Missed steps, replayed by the Triton kernels."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from stampede.optim.lookup import Lookup
from stampede.optim.step_history import StepHistory
from stampede.optim.table_array import TableArray
from stampede.optim.triton.catch_up import catch_up_range_, catch_up_rows_


def replay_range_(
    array: TableArray,
    last: Tensor,
    rows: range,
    history: StepHistory,
    nonfinite: Tensor | None = None,
) -> None:
    """Bring neighbouring rows of an array of Adam's up to date.

    Args:
        last: `[rows of the array]` int32, the step each row is at.
        rows: which ones.
        history: the steps.
        nonfinite: `[1]` int32; unless it is 0 nothing is written. None for 0.
    """
    catch_up_range_(
        *array.adam_tensors(), last, rows.start, rows.stop, **_steps(array, history, nonfinite)
    )


def replay_lookup_(
    array: TableArray,
    last: Tensor,
    lookup: Lookup,
    history: StepHistory,
    nonfinite: Tensor | None = None,
) -> None:
    """Bring the rows of a lookup up to date; see `replay_range_`."""
    runs = lookup.runs
    catch_up_rows_(
        *array.adam_tensors(), last, runs.rows, runs.count, **_steps(array, history, nonfinite)
    )


def _steps(array: TableArray, history: StepHistory, nonfinite: Tensor | None) -> dict[str, Any]:
    settings = array.settings
    return {
        "steps": history.constants,
        "first_step": history.first,
        "now": history.now,
        "betas": settings.rule.betas,
        "l2": settings.l2,
        "nonfinite": nonfinite,
    }
