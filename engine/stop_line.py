"""The line of `metrics.jsonl` that says why a run has stopped."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from stampede.engine.errors import TrainingStoppedError
from stampede.engine.processes import Processes
from stampede.engine.run_folder import RunFolder


@contextmanager
def noting_a_stop(
    folder: RunFolder, processes: Processes, newest_step: Callable[[], int]
) -> Iterator[None]:
    """Log why the training within it stops, where it can be logged.

    Args:
        folder: of the run.
        processes: all of which stop.
        newest_step: tells the step that was taken last.
    """
    try:
        yield
    except TrainingStoppedError as stop:
        step = newest_step() if stop.step is None else stop.step
        line = {"kind": "stopped", "step": step, "reason": str(stop)}
        with suppress(TrainingStoppedError):
            processes.on_main(lambda: folder.log(line))
        raise
