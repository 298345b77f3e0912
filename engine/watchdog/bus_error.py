"""A mapped data file that is shortened: the process says so instead of dying without a word."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from stampede.data import DataError, Dataset
from stampede.data.prepared.part import ShardedPart
from stampede.engine.exit_status import MISTAKE
from stampede.engine.processes import launched_rank
from stampede.engine.watchdog.last_words import within

_Handler = ctypes.CFUNCTYPE(None, ctypes.c_int)


@contextmanager
def bus_errors_explained(dataset: Dataset) -> Iterator[None]:
    """Within it a SIGBUS from a file of the data ends the process with a sentence and status 2.

    Who reads a mapped page that its file no longer has gets that signal. A handler of Python's
    would be called once the reading instruction has succeeded, which is never. So C calls this one,
    on the thread that reads and in the middle of that; it may do what Python can, as who reads data
    holds none of the locks it needs. Any other SIGBUS ends the process as ever.

    Args:
        dataset: as opened, its files mapped.
    """
    parts = [
        part
        for part in (dataset.train, dataset.validation, dataset.test)
        if isinstance(part, ShardedPart)
    ]
    set_handler = ctypes.CDLL(None).signal
    set_handler.restype = ctypes.c_void_p
    set_handler.argtypes = [ctypes.c_int, ctypes.c_void_p]

    @_Handler
    def explain(number: int) -> None:
        try:
            for part in parts:
                for shard in part.shards:
                    shard.check_lengths()
        except DataError as failure:
            _end_process(failure)
        finally:
            # The instruction is tried again when this returns.
            set_handler(number, None)

    before = set_handler(signal.SIGBUS, ctypes.cast(explain, ctypes.c_void_p))
    try:
        yield
    finally:
        set_handler(signal.SIGBUS, before)


def _end_process(failure: DataError) -> None:
    where = f" on rank {launched_rank()}" if launched_rank() else ""
    # Not through `sys.stderr`, whose lock another thread may hold.
    os.write(2, f"\nerror{where}: {failure}\n".encode())
    within(1.0, sys.stdout.flush)
    os._exit(MISTAKE)
