"""The C library's allocator, told to keep what training asks for again in every step."""

from __future__ import annotations

import ctypes
import os

# Of malloc.h.
_TRIM_THRESHOLD, _MMAP_MAX = -1, -4

# torch reads it when it first allocates: big blocks then lie in huge pages.
_HUGE_PAGES = "THP_MEM_ALLOC_ENABLE"

_OF_GLIBC = (
    "GLIBC_TUNABLES",
    "MALLOC_TRIM_THRESHOLD_",
    "MALLOC_MMAP_MAX_",
    "MALLOC_MMAP_THRESHOLD_",
)


def keep_freed_memory() -> None:
    """Keep freed blocks for the next step, and take big ones in huge pages; call before torch is
    imported.

    Left to itself, glibc gives every big block back to the system, which hands it out again page
    by page, filled with zeros: at a batch of 65,536 a tenth of a step. The process then holds at
    least what it has needed at most, until it ends. Settings of these in the environment are left
    alone, and other C libraries than glibc.
    """
    os.environ.setdefault(_HUGE_PAGES, "1")
    if any(name in os.environ for name in _OF_GLIBC):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        # -1: never give memory back; 0: no block of a mapping of its own, which would be.
        mallopt(_TRIM_THRESHOLD, -1)
        mallopt(_MMAP_MAX, 0)
