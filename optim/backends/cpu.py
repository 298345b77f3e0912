"""Lookup and update of an array of float32 tables on a CPU, by the C++ kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from stampede.optim import native
from stampede.optim.backends.torch import TorchBackend
from stampede.optim.clip import CowClip
from stampede.optim.lookup import Lookup
from stampede.optim.rows import RowGradients
from stampede.optim.rules import Adam, step_constants
from stampede.optim.table_array import Measured, PendingUpdate, TableArray
from stampede.optim.waiting_rows import WaitingRows, is_replayable

# Shapes and dtypes are as in `optim/native`.
_OPS = torch.ops.stampede


class CpuBackend(TorchBackend):
    """The C++ kernels; PyTorch for rules other than Adam."""

    name = "the C++ kernels"

    def __init__(self, array: TableArray, *, defers: bool) -> None:
        super().__init__(array)
        settings = array.settings
        if is_replayable(settings):
            self.waiting = _WaitingRows(array, defers)
        is_still = type(settings.rule) is Adam and not settings.moves_untouched_rows
        self._steps = self.waiting is not None or is_still
        self.pools = True

    def is_sound(self, lookup: Lookup) -> bool:
        """Whether the bags of a lookup are consecutive and each id is inside its table."""
        return _OPS.is_sound(*_ids_of(lookup), lookup.rows)

    def pool_(self, lookup: Lookup, output: Tensor) -> None:
        """See `TorchBackend.pool_`; the bags are pooled, the columns of the output contiguous."""
        weights = self.array.weights
        _OPS.pool_rows_(weights, *_ids_of(lookup), lookup.mean, lookup.float_weights, output)

    def sum_by_row(self, lookup: Lookup, grad: Tensor) -> RowGradients:
        """See `TorchBackend.sum_by_row`."""
        if grad.dtype != torch.float32:
            return super().sum_by_row(lookup, grad)
        return native.sum_by_row(lookup, grad, self.array.weights.shape[1])

    def measure(self, update: PendingUpdate) -> Measured:
        """See `Backend.measure`; norms of whole rows are left to the pass of `step_`."""
        array, (rows, grads, _) = self.array, update.batch
        is_fused = (
            self._steps
            and type(array.settings.clip) is CowClip
            and not array.is_split
            and grads.dtype == torch.float32
            and grads.is_contiguous()
            and _OPS.are_finite(array.weights, rows, grads, array.settings.l2)
        )
        return Measured(update, None) if is_fused else super().measure(update)

    def _measure_rows(self, batch: RowGradients) -> tuple[Tensor, Tensor]:
        if batch.grads.dtype != torch.float32:
            return super()._measure_rows(batch)
        array = self.array
        grads, squares = _OPS.measure_rows(
            array.weights, batch.rows, batch.grads, array.local_width, array.settings.l2
        )
        return grads, torch.stack([*squares, *self._owned_states(batch.rows)])

    def step_(self, measured: Measured) -> Tensor:
        """See `Backend.step_`."""
        if not self._steps:
            return super().step_(measured)
        array, settings, update = self.array, self.array.settings, measured.update
        clip, is_fused = settings.clip, measured.values is None
        constants, last = self._begin_step(update.lr, update.step)
        clipped = _OPS.clip_and_step_rows_(
            *array.adam_tensors(),
            *update.batch,
            None if is_fused else measured.factors()[0],
            array.local_width if clip.clips else 0,
            *(clip.row_bounds(array.width) if clip.clips and is_fused else (0.0, 0.0)),
            # What was measured includes the L2 term.
            settings.l2 if is_fused else 0.0,
            constants,
            *settings.rule.betas,
            last,
            update.step,
        )
        if self.waiting is not None:
            self.waiting.end_step(len(update.batch.rows))
        return measured.counts(clipped)

    def _begin_step(self, lr: float, step: int) -> tuple[Tensor, Tensor | None]:
        """The constants of a step, and the step each row is at if rows wait."""
        if self.waiting is None:
            settings = self.array.settings
            constants = step_constants(settings.rule, lr, step, settings.weight_decay)
            return torch.tensor([constants]), None
        return self.waiting.begin_step(lr, step), self.waiting.last


class _WaitingRows(WaitingRows):
    """Rows that wait, replayed by the C++ kernels."""

    def __init__(self, array: TableArray, defers: bool) -> None:
        super().__init__(array.settings, array.weights, defers=defers)
        self.array = array

    def replay_range(self, first_row: int, stop_row: int) -> None:
        with self.array.keeping_frozen_row():
            _OPS.catch_up_range_(
                *self.array.adam_tensors(), self.last, first_row, stop_row, *self._schedule()
            )

    def replay_lookup(self, lookup: Lookup) -> None:
        with self.array.keeping_frozen_row():
            _OPS.catch_up_lookup_(
                *self.array.adam_tensors(), self.last, *_ids_of(lookup), *self._schedule()
            )

    def _schedule(self) -> tuple[Tensor, int, int, float, float, float]:
        settings = self.array.settings
        return self.steps, self.first, self.now, *settings.rule.betas, settings.l2


def _ids_of(lookup: Lookup) -> tuple[Tensor, Tensor, Tensor]:
    return lookup.indices, lookup.offsets, lookup.first_rows
