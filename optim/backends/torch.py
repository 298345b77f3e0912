"""Lookup and update of an array of tables in plain PyTorch: every rule, dtype and device."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from stampede.optim.lookup import Lookup
from stampede.optim.rows import RowGradients, sum_by_row
from stampede.optim.rules import Adam, RowGradientSquares, RowStep
from stampede.optim.table_array import Measured, PendingUpdate, TableArray
from stampede.optim.waiting_rows import WaitingRows

# Elements of a table that are read or stepped at a time: 4 MB of each array stay in cache.
BLOCK_ELEMENTS = 1 << 20


class TorchBackend:
    """The kernels of one array in plain PyTorch; the base of those in C++ and Triton.

    Attributes:
        array: the tables.
        waiting: the rows that take their steps later; None if each step sweeps all rows.
        pools: whether to use `pool_` instead of FBGEMM's lookup.
        must_pool: whether FBGEMM's lookup does not support these tables.
        needs_checked_ids: whether ids must be inside their tables before `catch_up` and `pool_`.
    """

    name = "plain PyTorch"
    pools = False

    def __init__(self, array: TableArray) -> None:
        self.array = array
        self.waiting: WaitingRows | None = None
        # FBGEMM's lookup does not support bf16 on a CPU, and on a GPU reads 4 columns at a time.
        is_odd = array.weights.is_cuda and array.weights.shape[1] % 4 != 0
        self.must_pool = array.weights.dtype == torch.bfloat16 or is_odd
        self.needs_checked_ids = self.must_pool

    def is_sound(self, lookup: Lookup) -> bool:
        """Whether bags and ids of a lookup are valid; False leaves the check to FBGEMM."""
        return True

    def pool_(self, lookup: Lookup, output: Tensor) -> None:
        """Write a lookup's output, `[batch, features * dim]` or, not pooled, `[ids, dim]`."""
        lengths, weights = lookup.offsets.diff(), lookup.per_sample_weights
        starts = lookup.first_rows.repeat_interleave(lookup.batch).repeat_interleave(lengths)
        values = self.array.weights[lookup.indices + starts].float()
        if lookup.pooled:
            if weights is not None:
                values = values * weights[:, None]
            values = torch.segment_reduce(values, "sum", lengths=lengths, unsafe=True)
            if lookup.mean:
                values = values / lengths.clamp_min(1)[:, None]
            values = values.view(lookup.features, lookup.batch, -1).transpose(0, 1)
        output.copy_(values.reshape(output.shape))

    def sum_by_row(self, lookup: Lookup, grad: Tensor) -> RowGradients:
        """Sum the gradient of a lookup's output by row."""
        bags = lookup.bags()
        rows = lookup.rows_of(bags)
        if not lookup.pooled:
            return sum_by_row(rows, grad)
        return sum_by_row(
            rows, _of_bags(lookup, grad), lookup.source_of(bags), lookup.coefficient(bags)
        )

    def gradient_of_weights(self, lookup: Lookup, grad: Tensor) -> Tensor:
        """`[ids]` float32: the gradient of the per-sample weights of a pooled lookup."""
        bags = lookup.bags()
        of_bags = _of_bags(lookup, grad)[lookup.source_of(bags)].float()
        found = (self.array.weights[lookup.rows_of(bags)].float() * of_bags).sum(1)
        return found * lookup.share_of(bags) if lookup.mean else found

    def measure(self, update: PendingUpdate) -> Measured:
        """See `Backend`."""
        grads, values = self._measure_rows(update.batch)
        measured = replace(update, batch=update.batch._replace(grads=grads))
        needs_all = self.array.settings.needs_all_rows
        return Measured(measured, values, self._measure_all() if needs_all else None)

    def _measure_rows(self, batch: RowGradients) -> tuple[Tensor, Tensor]:
        """Gradients of the batch's rows with their L2 term, a new tensor; the rows' values."""
        clipped = self.array.local_width
        weights = self.array.taken(batch.rows)
        grads = torch.add(
            batch.grads.to(weights.dtype), weights, alpha=2.0 * self.array.settings.l2
        )
        parts = (grads[:, :clipped], grads[:, clipped:], weights[:, :clipped])
        squares = [_squares(part) for part in parts]
        return grads, torch.stack([*squares, *self._owned_states(batch.rows)])

    def _owned_states(self, rows: Tensor | slice) -> list[Tensor]:
        """Row states; zero if another column shard holds the ones to use."""
        array = self.array
        states = [array.states[name][rows] for name in array.row_state_names]
        # Column shards of one array begin at one column, see `CowClipTables`.
        return list(map(torch.zeros_like, states)) if array.shards[0].column_offset else states

    def _measure_all(self) -> Tensor:
        """Values of every row as if its gradient were the L2 term only; 0 for the frozen row."""
        array, weights = self.array, self.array.weights
        clipped, count = array.local_width, len(weights)
        dtype = torch.promote_types(weights.dtype, torch.float32)
        matrix = weights.new_empty(3 + len(array.row_state_names), count, dtype=dtype)
        block = max(1, BLOCK_ELEMENTS // weights.shape[1])
        for first in range(0, count, block):
            part = weights[first : first + block].to(dtype)
            matrix[1, first : first + block] = _squares(part[:, clipped:])
            matrix[2, first : first + block] = _squares(part[:, :clipped])
        decay = (2.0 * array.settings.l2) ** 2
        matrix[0] = matrix[2] * decay
        matrix[1] *= decay
        for row, state in zip(matrix[3:], self._owned_states(slice(None)), strict=True):
            row.copy_(state)
        if array.frozen_row is not None:
            matrix[:3, array.frozen_row] = 0.0
        return matrix

    def step_(self, measured: Measured) -> Tensor:
        """See `Backend`.

        Copies the batch's rows, steps them, sweeps all others, and writes the copies back.
        """
        array, settings = self.array, self.array.settings
        update, (factor, swept_factor) = measured.update, measured.factors()
        (rows, grads, counts), lr, step = update.batch, update.lr, update.step
        if factor is not None:
            grads[:, : array.local_width].mul_(factor[:, None])
        weights = array.taken(rows)
        states = {name: array.states[name][rows] for name in array.element_state_names}
        squares = self._take_values(states, measured.values, factor)
        if settings.weight_decay:
            weights.mul_(1.0 - lr * settings.weight_decay)
        settings.rule.step_(RowStep(weights, grads, counts, states, squares, lr, step))
        if settings.moves_untouched_rows:
            # As if no row were in the batch.
            with array.keeping_frozen_row():
                self._sweep(measured.everything, swept_factor, lr, step)
        array.weights.index_copy_(0, rows, array.rounded(weights, rows, step))
        for name, state in states.items():
            array.states[name].index_copy_(0, rows, state)
        return measured.counts(0 if factor is None else (factor < 1).sum())

    def _take_values(
        self, states: dict[str, Tensor], values: Tensor, factor: Tensor | None
    ) -> RowGradientSquares:
        """Add the row states, views of the values; squares of the gradients after the clip."""
        states |= zip(self.array.row_state_names, values[3:], strict=True)
        squares = values[0] if factor is None else values[0] * factor * factor
        return RowGradientSquares(squares, values[1], self.array.width, self.array.local_width)

    def _sweep(self, values: Tensor | None, factor: Tensor | None, lr: float, step: int) -> None:
        """One step of every row as if it were outside of the batch; `values` are of all rows."""
        array, settings = self.array, self.array.settings
        decay = 1.0 - lr * settings.weight_decay
        element_wise = type(settings.rule) is Adam and factor is None and not array.is_rounded()
        # The fused kernel would compute the L2 term from decayed weights.
        if element_wise and not (settings.l2 and settings.weight_decay):
            if settings.weight_decay:
                array.weights.mul_(decay)
            weights, *moments = (t.view(-1).split(BLOCK_ELEMENTS) for t in array.adam_tensors())
            zero = torch.zeros_like(weights[0])
            zeros = [zero[: len(part)] for part in weights]
            settings.rule.update_(weights, zeros, *moments, lr, step, l2=settings.l2)
            return
        block = max(1, BLOCK_ELEMENTS // array.weights.shape[1])
        for first in range(0, len(array.weights), block):
            rows = slice(first, first + block)
            stored, part = array.weights[rows], None if factor is None else factor[rows]
            weights = stored.float() if array.is_rounded() else stored
            grads = weights * (2.0 * settings.l2)
            if part is not None:
                grads[:, : array.local_width].mul_(part[:, None])
            states = {name: array.states[name][rows] for name in array.element_state_names}
            squares = None
            if array.row_state_names:
                squares = self._take_values(states, values[:, rows], part)
            if settings.weight_decay:
                weights.mul_(decay)
            none = torch.zeros(len(weights), dtype=torch.int64, device=weights.device)
            settings.rule.step_(RowStep(weights, grads, none, states, squares, lr, step))
            for name in array.row_state_names:
                array.states[name][rows] = states[name]
            if array.is_rounded():
                ids = torch.arange(first, first + len(weights), device=weights.device)
                stored.copy_(array.rounded(weights, ids, step))

    def catch_up(self, lookup: Lookup, step: int) -> None:
        """Bring the rows of a lookup to `step`, the newest one of the array."""
        if self.waiting is not None:
            self.waiting.set_step(step)
            self.waiting.catch_up(lookup)

    def flush(self) -> None:
        """Bring all rows up to date."""
        if self.waiting is not None:
            self.waiting.flush()

    def rewind(self, step: int) -> None:
        """Note that the steps after `step` were queued but not taken."""
        if self.waiting is not None:
            self.waiting.rewind(step)


def _of_bags(lookup: Lookup, grad: Tensor) -> Tensor:
    """`[batch * features, dim]` of `[batch, features * dim]`."""
    return grad.reshape(lookup.batch * lookup.features, grad.shape[1] // lookup.features)


def _squares(values: Tensor) -> Tensor:
    return torch.linalg.vector_norm(values, dim=1).square_()
