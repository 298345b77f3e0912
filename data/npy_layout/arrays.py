"""`.npy` files read and written a block of rows at a time."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from stampede.data.errors import DataError

BLOCK_ROWS = 1 << 18


def open_array(path: Path) -> np.ndarray:
    """The array in a file, memory-mapped.

    Raises:
        DataError: it is absent, damaged, or holds Python objects.
    """
    try:
        return np.load(path, mmap_mode="r", allow_pickle=False)
    except OSError as failure:
        raise DataError(f"{path}: {failure.strerror or failure}") from None
    except (ValueError, EOFError) as failure:
        raise DataError(
            f"{path}: no array that can be read ({failure}); write it with numpy.save"
        ) from None


def write_array(
    path: Path, blocks: Iterable[np.ndarray], shape: tuple[int, ...], dtype: str
) -> None:
    """Write an array whose blocks of rows come one after another.

    Args:
        path: file to write.
        blocks: `[any, ...]` each, together of `shape`.
        shape: of the whole array.
        dtype: on disk.
    """
    header = {"descr": np.dtype(dtype).str, "fortran_order": False, "shape": shape}
    with path.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, header)
        for block in blocks:
            file.write(np.ascontiguousarray(block, dtype=dtype).data)
        file.flush()
        os.fsync(file.fileno())


def blocks(array: np.ndarray, start: int = 0, stop: int | None = None) -> Iterator[np.ndarray]:
    """Rows `start` to `stop - 1` of an array, `BLOCK_ROWS` at a time."""
    stop = len(array) if stop is None else stop
    for first in range(start, stop, BLOCK_ROWS):
        yield array[first : min(first + BLOCK_ROWS, stop)]
