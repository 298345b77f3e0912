"""Memory that has run out: how it is recognised."""

from __future__ import annotations

import errno

import torch

# What torch, its libraries and C++ say in errors of no type of their own.
_SAID = (
    "DefaultCPUAllocator",
    "out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "std::bad_alloc",
)

_LONGEST = 300


def lacks_memory(failure: BaseException) -> bool:
    """Whether an error says that there is no memory left, in main memory or on a GPU."""
    if isinstance(failure, MemoryError | torch.OutOfMemoryError):
        return True
    if isinstance(failure, OSError):
        return failure.errno == errno.ENOMEM
    return isinstance(failure, RuntimeError) and any(said in str(failure) for said in _SAID)


def what_was_asked(failure: BaseException) -> str:
    """The error's own words, in a line."""
    lines = str(failure).strip().splitlines() or [type(failure).__name__]
    # Where in torch's sources it was raised says nothing to a user.
    return lines[0].rpartition("err == 0. ")[2][:_LONGEST]
