"""Tile sizes."""

from dataclasses import asdict
from itertools import product

from stampede.optim.triton import MANY_OCCURRENCES, block_sizes


def test_tiles_are_powers_of_two_that_hold_a_row():
    for dim, occurrences in product(range(4, 257, 4), (0, 1, 1 << 20, MANY_OCCURRENCES)):
        sizes = block_sizes(dim, occurrences)
        assert all(size >= 1 and size & (size - 1) == 0 for size in asdict(sizes).values())
        assert dim <= sizes.columns < 2 * dim
        assert sizes.together <= sizes.window
        # Registers of a thread, with several values an element.
        for elements, warps in (
            (sizes.together * sizes.columns, sizes.window_warps),
            (sizes.runs * sizes.columns, sizes.run_warps),
            (sizes.rows * sizes.columns, sizes.row_warps),
            (sizes.elements, sizes.element_warps),
        ):
            assert elements // (32 * warps) <= 16


def test_windows_stay_few():
    for occurrences in (1 << 19, 26 << 19):
        assert occurrences / block_sizes(16, occurrences).window <= 1 << 16
