"""The update of embedding rows on a GPU, in Triton kernels.

`stampede.optim` works without Triton: it is imported only where a kernel is used. No function waits
for the device. The number of distinct rows stays on the device, so buffers have room for the
maximum.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import NamedTuple

from torch import Tensor

# Above this many occurrences windows are twice as long, for fewer of them and a smaller buffer.
MANY_OCCURRENCES = 1 << 22
MAX_COLUMNS = 256


@dataclass(frozen=True)
class BlockSizes:
    """Tile sizes, all powers of two, and warps of each kind of program."""

    columns: int  # Of a tile; at least the table's.
    window: int  # Sorted occurrences that are summed separately if all are of one row.
    together: int  # Occurrences of a window in a tile.
    window_warps: int
    runs: int  # Distinct rows whose gradients a program sums.
    unroll: int  # Occurrences of each row that are loaded before the first is added.
    run_warps: int
    rows: int  # Distinct rows that a program updates.
    row_warps: int
    elements: int  # Whose missed steps a program replays.
    element_warps: int


class RowSums(NamedTuple):
    """Gradients `[capacity, dim]` float32 of distinct rows, L2 included; undefined beyond the runs.

    `squares` is `[3, capacity]` float32: squared norms of the gradient over the clipped columns and
    over the others, and of the weights over the clipped columns.
    """

    grads: Tensor
    squares: Tensor


def block_sizes(dim: int, occurrences: int) -> BlockSizes:
    """Sizes for a table of `dim` columns and a batch of `occurrences` ids."""
    columns = 1 << (dim - 1).bit_length()
    window = 128 if occurrences < MANY_OCCURRENCES else 256
    return BlockSizes(
        columns=columns,
        window=window,
        together=min(window, max(8, 2048 // columns)),
        window_warps=4,
        # One warp and few rows, since all wait for the program's longest run. A run without a whole
        # window is shorter than two windows.
        runs=max(1, 256 // columns),
        unroll=4,
        run_warps=1,
        rows=max(1, 1024 // columns),
        row_warps=4,
        # Likewise, all wait for the row that has missed the most steps.
        elements=128,
        element_warps=1,
    )


def is_available() -> bool:
    """Whether the kernels can run: Triton is installed, and a GPU or its interpreter is there."""
    if find_spec("triton") is None:
        return False
    import torch
    from triton import knobs

    return torch.cuda.is_available() or bool(knobs.runtime.interpret)


def handles(weights: Tensor) -> bool:
    """Whether the kernels can update a table with these weights."""
    return weights.is_cuda and is_available()
