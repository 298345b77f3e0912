"""Before torch is imported: quiet libraries, kept memory, no open ports, torchrun's processes."""

from __future__ import annotations

import ctypes
import logging
import os
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

# Of malloc.h.
_TRIM_THRESHOLD, _MMAP_MAX = -1, -4

_SETTINGS_OF_GLIBC = (
    "GLIBC_TUNABLES",
    "MALLOC_TRIM_THRESHOLD_",
    "MALLOC_MMAP_MAX_",
    "MALLOC_MMAP_THRESHOLD_",
)


# Loggers from the root down, and what each shows at least.
_LEVELS = {
    None: logging.ERROR,
    "torchrec": logging.ERROR,
    "fbgemm_gpu": logging.ERROR,
    "torch": logging.ERROR,
    "torch.fx._symbolic_trace": logging.ERROR,
    "stampede": logging.WARNING,
}


def quiet_libraries() -> None:
    """Show only errors of torch, torchrec and fbgemm; users can do nothing about the rest."""
    for name, level in _LEVELS.items():
        logging.getLogger(name).setLevel(level)
    warnings.filterwarnings("ignore")
    show = threading.excepthook

    def show_others(failure: threading.ExceptHookArgs) -> None:
        # A failure in TensorBoard's thread is raised again when events are written.
        if type(failure.thread).__name__ != "_AsyncWriterThread":
            show(failure)

    threading.excepthook = show_others


@contextmanager
def libraries_quiet() -> Iterator[None]:
    """`quiet_libraries` for a while, for a user's process such as a notebook."""
    before = {name: logging.getLogger(name).level for name in _LEVELS}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, level in _LEVELS.items():
            # The user may have set stampede's level.
            chosen = before[name] or level if name == "stampede" else max(level, before[name])
            logging.getLogger(name).setLevel(chosen)
        try:
            yield
        finally:
            for name, level in before.items():
                logging.getLogger(name).setLevel(level)


def keep_freed_memory() -> None:
    """Let glibc keep freed blocks for the next step, and torch take big ones in huge pages.

    By default glibc returns every big block to the system and gets it back page by page, filled
    with zeros: a tenth of a step at batch 65,536. With this, a process keeps its peak to the end.
    Settings in the environment take precedence, and C libraries other than glibc are left alone.
    """
    # torch reads it at its first allocation.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    if any(name in os.environ for name in _SETTINGS_OF_GLIBC):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        # -1: never give memory back; 0: no separate mappings, which are given back too.
        mallopt(_TRIM_THRESHOLD, -1)
        mallopt(_MMAP_MAX, 0)


def stay_on_this_machine() -> None:
    """Let gloo listen only on the loopback device if all ranks are on one machine."""
    if launched_world_size() == int(os.environ.get("LOCAL_WORLD_SIZE", "1")):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def launched_world_size() -> int:
    """Number of processes that `torchrun` started; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))
