"""Updates an array of tables on a GPU by Triton kernels, queued without waiting."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from stampede.optim.backends.torch import TorchBackend
from stampede.optim.clip import CowClip
from stampede.optim.lookup import LookedUpGradients, Lookup
from stampede.optim.nonfinite import LATE, NonFiniteFlag
from stampede.optim.rules import Adam, step_constants
from stampede.optim.table_array import Measured, PendingUpdate, TableArray
from stampede.optim.triton import MAX_COLUMNS, RowSums
from stampede.optim.triton.steps import (
    Missed,
    State,
    catch_up_range_,
    catch_up_rows_,
    update_rows_,
)
from stampede.optim.triton.sum_runs import sum_runs
from stampede.optim.waiting_rows import WaitingRows, is_replayable


def why_not(array: TableArray) -> str | None:
    """Why the kernels cannot update an array, or None if they can."""
    settings, weights, dim = array.settings, array.weights, array.weights.shape[1]
    needs_replay = settings.moves_untouched_rows and not is_replayable(settings)
    is_odd = dim % 4 or not 4 <= dim <= MAX_COLUMNS
    is_split = settings.clip.clips and array.width != array.local_width
    reasons = [
        (type(settings.rule) is not Adam, f"the rule is {type(settings.rule).__name__}, not Adam"),
        (type(settings.clip) is not CowClip, f"the clip is {settings.clip.name}, not CowClip"),
        (settings.on_nonfinite != "error", f"on_nonfinite is {settings.on_nonfinite!r}"),
        (array.frozen_row is not None, "a row is frozen"),
        (weights.dtype != torch.float32, f"the weights are {weights.dtype}, not float32"),
        (is_odd, f"{dim} columns are not a multiple of 4 up to {MAX_COLUMNS}"),
        (is_split, "their columns are split, so norms need sums over ranks"),
        (needs_replay, "rows outside of a batch take steps that cannot be replayed"),
    ]
    return next((reason for holds, reason in reasons if holds), None)


@dataclass
class _Queued(Measured):
    """Of an update that is queued: the rows' sums on the device; None for a batch without ids."""

    sums: RowSums | None = None


class TritonBackend(TorchBackend):
    """Queues the gradients of one lookup, without waiting for the device.

    The host does not know their rows. `measure` sets the flag if one is not finite, and `step_`
    writes nothing while it is set. PyTorch steps rows that were summed over several lookups.
    """

    name = "the Triton kernels"

    def __init__(self, array: TableArray, flag: NonFiniteFlag) -> None:
        super().__init__(array)
        self._flag = flag.tensor
        if is_replayable(array.settings):
            self.waiting = _WaitingRows(array, flag)
        self.needs_checked_ids = self.waiting is not None

    def measure(self, update: PendingUpdate) -> Measured:
        """See `Backend.measure`."""
        if isinstance(update.batch, LookedUpGradients):
            lookup, grad = update.batch
            # It may be expanded, as that of a sum.
            grad = grad.contiguous().view(-1, self.array.weights.shape[1])
            sums = sum_runs(lookup.runs, grad, self.array, self._flag)
            return _Queued(update, None, sums=sums)
        return super().measure(update) if len(update.batch.rows) else _Queued(update, None)

    def step_(self, measured: Measured) -> Tensor:
        """See `Backend.step_`."""
        update, waiting, settings = measured.update, self.waiting, self.array.settings
        if not isinstance(measured, _Queued):
            if waiting is not None:
                waiting.set_step(update.step - 1)
                waiting.flush()
            counts = super().step_(measured)
            if waiting is not None:
                waiting.all_are_at(update.step)
            return counts
        counts = torch.zeros(3, dtype=torch.int64, device=self.array.weights.device)
        if waiting is not None:
            waiting.begin_step(update.lr, update.step)
        if measured.sums is not None:
            update_rows_(
                self.array,
                update.batch.lookup.runs,
                measured.sums,
                constants=step_constants(
                    settings.rule, update.lr, update.step, settings.weight_decay
                ),
                nonfinite=self._flag,
                row_counts=counts,
                last=None if waiting is None else waiting.last,
                step=update.step,
            )
        if waiting is not None:
            waiting.end_step(None)
        return counts


class _WaitingRows(WaitingRows):
    """Rows that wait, replayed by the Triton kernels unless the flag is set."""

    def __init__(self, array: TableArray, flag: NonFiniteFlag) -> None:
        # More steps begin before it is known that one was not taken.
        super().__init__(array.settings, array.weights, defers=True, known_late=LATE + 1)
        self.array = array
        self._flag = flag.tensor

    def replay_range(self, first_row: int, stop_row: int) -> None:
        catch_up_range_(self._state(), first_row, stop_row, self._missed())

    def replay_lookup(self, lookup: Lookup) -> None:
        catch_up_rows_(self._state(), lookup.runs.rows, lookup.runs.count, self._missed())

    def _state(self) -> State:
        return *self.array.adam_tensors(), self.last

    def _missed(self) -> Missed:
        betas, l2 = self.array.settings.rule.betas, self.array.settings.l2
        return Missed(self.steps, self.first, self.now, betas, l2, self._flag)
