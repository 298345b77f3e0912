"""Keeps a prepared data set on disk, in memory or on the training device while it is read."""

from __future__ import annotations

import math
import mmap
import os
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from stampede.data.order import BLOCK_ROWS, Order, Shuffle
from stampede.data.prepared.reader import ShardedPart
from stampede.data.prepared.streaming import StreamedPart
from stampede.data.prepared.verify import damaged
from stampede.data.samples import Dataset, Part

# Share of the GPU memory that is free when training begins; activations need the rest.
DEVICE_SHARE = 0.5

# Four windows are in memory at a time: this one, the next and the two before.
_WINDOW_SHARE = 1 / 4

# The next window is requested a quarter faster than this one is used.
_LEAD = 1.25

_CHUNK = 1 << 24

# Linux truncates larger readahead requests to what the device takes at a time; its default.
_REQUEST = 128 << 10


def part_bytes(part: Part) -> int:
    """Size of a part's arrays; 0 for synthetic data."""
    return part.bytes if isinstance(part, ShardedPart) else 0


def choose_residence(wanted: str, dataset: Dataset, memory: float, device: torch.device) -> str:
    """Resolve `auto`; the data may take `memory` bytes. The batches do not depend on it."""
    if any(isinstance(part, StreamedPart) for part in dataset.parts().values()):
        return "disk"
    if wanted != "auto":
        return wanted
    size = sum(map(part_bytes, dataset.parts().values()))
    if device.type == "cuda" and size < DEVICE_SHARE * torch.cuda.mem_get_info(device)[0]:
        return "device"
    return "memory" if size <= memory else "disk"


def make_order(part: Part, wanted: str, memory: float, seed: int) -> Order:
    """The order of a part's rows; the same on all machines, so that runs are reproducible.

    Args:
        wanted: a `Shuffle`, or `auto`: `block` if the part is larger than `memory`, else `global`.
        memory: bytes that the data may take in main memory; decides the size of the windows.
    """
    size = part_bytes(part)
    shuffle: Shuffle = wanted
    if wanted == "auto":
        shuffle = "block" if size > memory else "global"
    window = 0
    if shuffle != "global" and size:
        blocks = _WINDOW_SHARE * memory * part.rows / size // BLOCK_ROWS
        window = max(int(blocks), 1) * BLOCK_ROWS
    return Order(part.rows, shuffle, seed, window)


def place(dataset: Dataset, residence: str, device: torch.device) -> Dataset:
    """Load the data set: `memory` reads it into the page cache, `device` copies it.

    Raises:
        torch.OutOfMemoryError: the data do not fit on the device.
    """
    parts = {n: p for n, p in dataset.parts().items() if isinstance(p, ShardedPart)}
    if residence == "memory":
        buffer = bytearray(_CHUNK)
        for array in (a for part in parts.values() for s in part.shards for a in s.maps.values()):
            try:
                with open(array.filename, "rb", buffering=0) as file:
                    while file.readinto(buffer):
                        pass
            except OSError as failure:
                said = f"cannot be read ({failure.strerror})"
                raise damaged(Path(array.filename), said) from None
    if residence != "device":
        return dataset
    return replace(dataset, **{name: part.resident(device) for name, part in parts.items()})


class Readahead:
    """Reads the next window from disk while this one is used, and drops old windows from memory.

    Of a `StreamedPart` it fetches the next window from the store, and makes room for it.
    Call it before reading each batch. The window before this one stays in memory, as another rank
    of this machine may be a few batches behind.
    """

    def __init__(self, part: ShardedPart, order: Order) -> None:
        self._part = part
        self._order = order
        # Windows in memory as (epoch, number); the last one is in use.
        self._used: list[tuple[int, int]] = []
        # Ranges of rows of the next window, and how many of them were requested.
        self._next = np.empty((0, 2), np.int64)
        self._asked = 0

    def __call__(self, epoch: int, position: int) -> None:
        """Prepare for the batch at this position of the epoch."""
        order = self._order
        number = order.window_at(position)
        if (epoch, number) not in self._used[-1:]:
            if len(self._used) > 1:
                # Unmap first: the kernel does not drop mapped pages.
                for shard in self._part.shards:
                    for array in shard.maps.values():
                        array.base.madvise(mmap.MADV_DONTNEED)
                forgotten = order.window_ranges(*self._used.pop(0))
                self._advise(forgotten, os.POSIX_FADV_DONTNEED)
            before = [order.window_ranges(*one) for one in self._used]
            self._used.append((epoch, number))
            last = order.window_at(order.rows - 1)
            after = (epoch, number + 1) if number < last else (epoch + 1, 0)
            self._next, self._asked = order.window_ranges(*after), 0
            here = order.window_ranges(epoch, number)
            if isinstance(self._part, StreamedPart):
                kept = np.concatenate([self._next[:0], *before])
                self._part.make_room(np.concatenate([here, self._next]), kept)
            # Request the rest; in the first window that is everything.
            self._advise(here, os.POSIX_FADV_WILLNEED)
        # Little by little: a long queue of requests would block this process.
        share = _LEAD * (position / order.window - number)
        wanted = min(math.ceil(share * len(self._next)), len(self._next))
        self._advise(self._next[self._asked : wanted], os.POSIX_FADV_WILLNEED)
        self._asked = max(self._asked, wanted)

    def _advise(self, ranges: np.ndarray, advice: int) -> None:
        if isinstance(self._part, StreamedPart) and advice == os.POSIX_FADV_WILLNEED:
            self._part.fetch_ahead(ranges)
        for first, last in ranges.tolist():
            for shard, start, stop in self._part.shards_between(first, last):
                for name, array in shard.maps.items():
                    begin, end = start, stop + name.startswith("offsets_")
                    if name.startswith(("values_", "weights_")):
                        offsets = shard.maps[f"offsets_{name.rpartition('_')[2]}"]
                        begin, end = int(offsets[start]), int(offsets[stop])
                    _advise_file(array, begin, end, advice)


def _advise_file(array: np.memmap, start: int, stop: int, advice: int) -> None:
    width = array.dtype.itemsize * int(np.prod(array.shape[1:]))
    begin, end = array.offset + start * width, array.offset + stop * width
    if begin == end:
        return
    step = _REQUEST if advice == os.POSIX_FADV_WILLNEED else end - begin
    # If the file was deleted, the map still works, and this is only advice.
    with suppress(OSError), open(array.filename, "rb", buffering=0) as file:
        for first in range(begin, end, step):
            os.posix_fadvise(file.fileno(), first, min(step, end - first), advice)
