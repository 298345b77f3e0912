"""The collectives of a training step on one of several ranks: waits and traffic."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from timing import Stopwatch, seconds_of
from torch import Tensor
from torch.utils import _pytree as pytree
from training import training

COLLECTIVES = (
    "all_to_all_single",
    "all_reduce",
    "all_gather",
    "all_gather_into_tensor",
    "reduce_scatter",
    "reduce_scatter_tensor",
)

# Names of a rank's input in the different collectives.
_INPUTS = ("input", "tensor", "input_tensor", "input_list")


class Recorder:
    """Records the collectives of a step, to run them again without other work between them.

    Attributes:
        calls: repeat the collectives.
        sent_bytes: of this rank, by collective.
    """

    def __init__(self) -> None:
        self.calls: list[Callable[[], Any]] = []
        self.sent_bytes: dict[str, int] = {}

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record all collectives inside the context."""
        with ExitStack() as stack:
            for name in COLLECTIVES:
                stack.enter_context(self._noted(name))
            yield

    @contextmanager
    def _noted(self, name: str) -> Iterator[None]:
        collective = getattr(dist, name)

        def call(*arguments: Any, **options: Any) -> Any:
            # Buffers of the same shape: the real ones may be freed or in use.
            again, more = pytree.tree_map_only(Tensor, torch.zeros_like, (arguments, options))
            self.calls.append(lambda: _wait(collective(*again, **more)))
            given = inspect.signature(collective).bind(*arguments, **options).arguments
            handed_in = pytree.tree_leaves([given.get(key) for key in _INPUTS])
            sent = sum(part.nbytes for part in handed_in if part is not None)
            self.sent_bytes[name] = self.sent_bytes.get(name, 0) + sent
            return collective(*arguments, **options)

        setattr(dist, name, call)
        try:
            yield
        finally:
            setattr(dist, name, collective)

    def run_again(self) -> None:
        """Run all recorded collectives, one after the other."""
        for call in self.calls:
            call()


def _wait(work: dist.Work | None) -> None:
    if work is not None:
        work.wait()


def train_and_wait(clicks: Path, overrides: list[str], steps: int) -> dict[str, Any]:
    """Train as one of several ranks.

    Returns:
        Seconds of the steps with the last flush, seconds in which this rank waited in collectives,
        seconds of the collectives alone, bytes sent in a step, and the
        processor time of this process.
    """
    watch, recorder = Stopwatch(), Recorder()
    with training(clicks, overrides) as job:
        job.seconds(2)
        with recorder.recording():
            job.step()
        job.flush()
        dist.barrier()
        with watch.watching(dist.Work, "wait", "waited"):
            total = job.seconds(steps)
        dist.barrier()
        recorder.run_again()
        dist.barrier()
        alone = seconds_of(lambda: [recorder.run_again() for _ in range(steps)])
    return {
        "seconds": total,
        "waited": watch.seconds.get("waited", 0.0),
        "waits": watch.calls.get("waited", 0),
        "alone": alone,
        "sent_bytes": recorder.sent_bytes,
        "processor_seconds": time.process_time(),
    }
