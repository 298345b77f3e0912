"""The time in which a rank is held up by collectives."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from stampede.engine.monitoring.phases import PhaseTimes


@contextmanager
def waits_counted(times: PhaseTimes) -> Iterator[None]:
    """Within it, what this thread and its backward passes wait in collectives is counted.

    All collectives of torch.distributed and TorchRec are waited for by `Work.wait`, which is
    replaced meanwhile: torch has no hook for it on gloo. On a CPU the wait ends when the data have
    arrived, so it includes the time for slower ranks. On a GPU it is the time for which the stream
    is held up.
    """
    original, thread = dist.Work.wait, threading.get_ident()

    def wait(work: dist.Work, *arguments: Any, **options: Any) -> Any:
        # A thread that writes a checkpoint waits as well; on a GPU, autograd has its own threads.
        if threading.get_ident() != thread and torch._C._current_graph_task_id() == -1:
            return original(work, *arguments, **options)
        since = times.mark()
        try:
            return original(work, *arguments, **options)
        finally:
            times.waited(since)

    dist.Work.wait = wait
    try:
        yield
    finally:
        dist.Work.wait = original
