"""How much of its work one program of each kernel takes."""

from __future__ import annotations

from dataclasses import dataclass

# Beyond this many occurrences, twice as long windows keep their number and buffer down.
MANY_OCCURRENCES = 1 << 22
MAX_COLUMNS = 256


@dataclass(frozen=True)
class BlockSizes:
    """Tile sizes, all powers of two, and warps of a program.

    Attributes:
        columns: columns of a tile, at least those of the table.
        window: sorted occurrences that are summed apart where they are all of one row.
        together: of these, how many a tile holds.
        window_warps: warps of a program that sums a window.
        runs: distinct rows whose gradients a program sums.
        unroll: occurrences of each that are loaded before the first is added.
        run_warps: warps of such a program.
        rows: distinct rows that a program updates.
        row_warps: warps of such a program.
        elements: elements whose missed steps a program replays.
        element_warps: warps of such a program.
    """

    columns: int
    window: int
    together: int
    window_warps: int
    runs: int
    unroll: int
    run_warps: int
    rows: int
    row_warps: int
    elements: int
    element_warps: int


def block_sizes(dim: int, occurrences: int) -> BlockSizes:
    """Sizes for a table of `dim` columns and a batch of `occurrences` ids.

    Raises:
        ValueError: no kernel is made for so many columns.
    """
    check_dim(dim)
    columns = 1 << (dim - 1).bit_length()
    window = 128 if occurrences < MANY_OCCURRENCES else 256
    return BlockSizes(
        columns=columns,
        window=window,
        together=min(window, max(8, 2048 // columns)),
        window_warps=4,
        # One warp, few rows: all wait for the longest run of the program. A run without a whole
        # window has less than two windows' occurrences.
        runs=max(1, 256 // columns),
        unroll=4,
        run_warps=1,
        rows=max(1, 1024 // columns),
        row_warps=4,
        # Likewise: all wait for the row that has missed the most steps.
        elements=128,
        element_warps=1,
    )


def check_dim(dim: int) -> None:
    """Raise ValueError unless the kernels take tables of `dim` columns."""
    if not 4 <= dim <= MAX_COLUMNS or dim % 4:
        raise ValueError(
            f"a table has {dim} columns; the Triton kernels take multiples of 4 up to {MAX_COLUMNS}"
        )
