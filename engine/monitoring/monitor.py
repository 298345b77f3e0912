"""Watches a training loop: times of its steps, a log for each rank, a trace."""

from __future__ import annotations

import os
import platform
import traceback
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from tqdm.auto import tqdm

from stampede.engine.checkpoint.described import versions
from stampede.engine.config import Config
from stampede.engine.errors import InterruptedRunError
from stampede.engine.monitoring.clocks import clock_of
from stampede.engine.monitoring.memory import peak_memory_bytes
from stampede.engine.monitoring.phases import EXCHANGES, PhaseTimes, StepTime
from stampede.engine.monitoring.rank_log import RankLog
from stampede.engine.monitoring.sentence import sentence_of
from stampede.engine.monitoring.trace import StepTrace
from stampede.engine.monitoring.waits import waits_counted
from stampede.engine.monitoring.window import Window, together, window_of
from stampede.engine.processes import Processes
from stampede.engine.restarts import restarts


class Monitor:
    """What a run does, step by step; a context around its training loop.

    Every `train.timing_every` steps, and at an epoch's end, each rank logs the times of its steps
    since the last such place, and all ranks send them to rank 0. 0: nothing is timed; each rank
    still logs how it begins and ends.

    Args:
        config: of the run.
        processes: all of which must make one, and call its methods at the same places.
        folder: of the run.
        step: the last one that earlier starts of the run have taken.
    """

    def __init__(self, config: Config, processes: Processes, folder: Path, step: int) -> None:
        self._config = config
        self._processes = processes
        self._folder = folder
        self._step = step
        self._every = config.train.timing_every
        self._times: PhaseTimes | None = None

    def __enter__(self) -> Monitor:
        processes = self._processes
        self._log = RankLog(self._folder, processes.rank)
        self._log.write(
            "started",
            step=self._step,
            world_size=processes.world_size,
            device=_name_of(processes.device),
            host=platform.node(),
            process=os.getpid(),
            restart=restarts()[0],
            versions={"python": platform.python_version(), **versions()},
        )
        self._trace = StepTrace(self._config.train.profile, processes, self._folder, self._step)
        self._stack = ExitStack()
        if self._every:
            exchanges = EXCHANGES if processes.device.type == "cuda" else ()
            self._times = PhaseTimes(clock_of(processes.device), exchanges)
            self._stack.enter_context(processes.pulse.listening(self._times.begin))
            self._stack.enter_context(waits_counted(self._times))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        failure: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        at = {"step": self._step, "stage": self._processes.pulse.stage}
        self._stack.close()
        self._trace.close(well=kind is None)
        if failure is None:
            self._log.write("ended", **at)
        elif isinstance(failure, InterruptedRunError):
            self._log.write("stopped", **at, reason=str(failure))
        else:
            lines = traceback.format_exception(kind, failure, trace)
            self._log.write("failed", **at, reason=str(failure), traceback="".join(lines))
        self._log.close()

    def after_step(self, step: int) -> None:
        """A step has been taken; all ranks call it after each."""
        self._step = step
        if self._times is not None:
            self._times.end_step()
        self._trace.after_step(step)

    def line(self, step: int, ended: bool) -> dict[str, Any] | None:
        """After a step, a line for `metrics.jsonl` where it is time for one, else None.

        Whether it is time depends on the arguments alone, so that all ranks find the same.

        Args:
            step: that was taken.
            ended: whether the epoch ends with it.

        Returns:
            On rank 0 what `together` gives; on others it lacks all but `kind` and `step`.
        """
        if self._times is None or not (ended or step % self._every == 0):
            return None
        steps = self._times.take()
        window = window_of(steps, peak_memory_bytes(self._processes.device))
        self._log.write("timing", step=step, **_own_fields(window, steps))
        line = {"kind": "timing", "step": step}
        windows = self._gathered(window)
        if windows is not None:
            line |= together(windows)
            if step % self._every == 0:
                tqdm.write(sentence_of(line, self._processes.world_size))
        return line

    def _gathered(self, window: Window) -> list[Window] | None:
        """Those of all ranks, on rank 0."""
        mine = torch.tensor(window.to_vector(), dtype=torch.float64)
        received = None
        if self._processes.is_main:
            received = [torch.empty_like(mine) for _ in range(self._processes.world_size)]
        dist.gather(mine, received)
        if received is None:
            return None
        return [Window.from_vector(numbers.tolist()) for numbers in received]


def _own_fields(window: Window, steps: list[StepTime]) -> dict[str, Any]:
    """What a rank's own log has of its steps."""
    outside: dict[str, float] = {}
    for step in steps:
        for stage, seconds in step.outside.items():
            outside[stage] = outside.get(stage, 0.0) + seconds
    return {
        "steps": window.steps,
        "step_seconds": {**window.percentiles, "mean": window.mean},
        "phase_seconds": window.phases,
        "communication_seconds": window.waited,
        **window.shares,
        "outside_seconds": outside,
        "peak_memory_bytes": window.peak_memory_bytes,
    }


def _name_of(device: torch.device) -> str:
    """For example `cpu` or `cuda:0 NVIDIA H200`."""
    if device.type == "cuda":
        return f"{device} {torch.cuda.get_device_name(device)}"
    return str(device)
