"""What a step must know of each row: squared norms and row states, over all its columns."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from stampede.optim import native
from stampede.optim.native import kernels
from stampede.optim.rows import RowGradients
from stampede.optim.rules import RowGradientSquares
from stampede.optim.table_array import TableArray

# Elements squared at a time, so that the squares stay in cache.
BLOCK_ELEMENTS = 1 << 20


@dataclass
class RowValues:
    """Values of rows as one matrix, which can be summed over column shards at once.

    Attributes:
        matrix: `[3 + row states, n]`: squared norm of the gradient over the clipped columns and
            over the others, squared norm of the weights over the clipped columns, row states.
    """

    matrix: Tensor

    @property
    def grad_squares(self) -> Tensor:
        """`[n]`, clipped columns."""
        return self.matrix[0]

    @property
    def rest_squares(self) -> Tensor:
        """`[n]`, the other columns."""
        return self.matrix[1]

    @property
    def weight_squares(self) -> Tensor:
        """`[n]`, clipped columns."""
        return self.matrix[2]

    def states(self, array: TableArray) -> dict[str, Tensor]:
        """Row states by name, views of the matrix."""
        return dict(zip(array.row_state_names, self.matrix[3:], strict=True))

    def after_clip(self, factor: Tensor | None, array: TableArray) -> RowGradientSquares:
        """Squares of the gradients once the clipped columns were multiplied by `factor`."""
        squares = self.grad_squares if factor is None else self.grad_squares * factor * factor
        return RowGradientSquares(squares, self.rest_squares, array.width, array.local_width)

    def __getitem__(self, part: slice | Tensor) -> RowValues:
        return RowValues(self.matrix[:, part])


def batch_values(array: TableArray, batch: RowGradients) -> tuple[Tensor, RowValues]:
    """Gradients of the batch's rows with their L2 term, and the values of these rows.

    Args:
        batch: rows of the array, and their gradients without the L2 term.

    Returns:
        `[n, dim]` gradients in a new tensor, in the dtype of the arithmetic, and the values.
    """
    clipped, l2 = array.local_width, array.settings.l2
    if native.handles(array.weights) and batch.grads.dtype == torch.float32:
        grads, squares = kernels.measure_rows(array.weights, batch.rows, batch.grads, clipped, l2)
        squares = list(squares)
    else:
        weights = array.taken(batch.rows)
        grads = torch.add(batch.grads.to(weights.dtype), weights, alpha=2.0 * l2)
        parts = (grads[:, :clipped], grads[:, clipped:], weights[:, :clipped])
        squares = [_squares(part) for part in parts]
    return grads, RowValues(torch.stack([*squares, *_owned_states(array, batch.rows)]))


def all_values(array: TableArray) -> RowValues:
    """Values of every row of the array without other gradient than the L2 term."""
    clipped, weights = array.local_width, array.weights
    matrix = torch.empty(
        3 + len(array.row_state_names),
        len(weights),
        dtype=torch.promote_types(weights.dtype, torch.float32),
        device=weights.device,
    )
    block = max(1, BLOCK_ELEMENTS // weights.shape[1])
    for first in range(0, len(weights), block):
        part = weights[first : first + block].to(matrix.dtype)
        matrix[1, first : first + block] = _squares(part[:, clipped:])
        matrix[2, first : first + block] = _squares(part[:, :clipped])
    decay = (2.0 * array.settings.l2) ** 2
    matrix[0] = matrix[2] * decay
    matrix[1] *= decay
    for row, state in zip(matrix[3:], _owned_states(array, slice(None)), strict=True):
        row.copy_(state)
    return RowValues(matrix)


def _owned_states(array: TableArray, rows: Tensor | slice) -> list[Tensor]:
    """Row states, zero where another column shard's are the ones that count."""
    # Column shards of one array begin at one column, see optim/sharded/layout.py.
    states = [array.states[name][rows] for name in array.row_state_names]
    if array.shards[0].column_offset:
        return [torch.zeros_like(state) for state in states]
    return states


def _squares(values: Tensor) -> Tensor:
    return torch.linalg.vector_norm(values, dim=1).square_()
