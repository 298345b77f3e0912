"""A trace of some steps by torch.profiler, a file for each rank."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path

from torch.profiler import profile, record_function
from tqdm.auto import tqdm

from stampede.engine.config import ProfileSection
from stampede.engine.console import say_given_up
from stampede.engine.heartbeat import LOOKING_UP
from stampede.engine.processes import Processes
from stampede.files import remove


def trace_file(folder: Path, rank: int) -> Path:
    """The trace of a rank in the folder of a run; Perfetto and TensorBoard read it."""
    return folder / "profile" / f"rank_{rank}.pt.trace.json.gz"


class StepTrace:
    """Traces the steps that `train.profile` asks for, with their phases.

    Each rank traces the same steps. If a trace cannot be written, a sentence says so.

    Args:
        step: the last one of earlier starts of the run.
    """

    def __init__(
        self, settings: ProfileSection, processes: Processes, folder: Path, step: int
    ) -> None:
        self._processes = processes
        self._file = trace_file(folder, processes.rank)
        self._start = settings.start
        self._first = max(settings.start, step + 1)
        self._last = settings.start + settings.steps - 1
        self._asked = settings.steps > 0
        self._step = step
        self._profile: profile | None = None
        self._phase, self._of_step, self._listening = ExitStack(), ExitStack(), ExitStack()

    def begin(self) -> None:
        """Training begins; all ranks call it once."""
        if self._asked and self._last <= self._step and not self._file.is_file():
            self._say_none(f"{self._step:,} are already done")
        self._begin_if_due()

    def after_step(self, step: int) -> None:
        """A step has ended; all ranks call it after each."""
        self._step = step
        if self._profile is not None:
            if step == self._last:
                self._write("")
            else:
                self._of_step.close()
                self._begin_phase(self._processes.heartbeat.stage)
        self._begin_if_due()

    def close(self, well: bool) -> None:
        """End the run, `well` or by a failure; write the trace so far."""
        if self._step < self._first <= self._last:
            if self._profile is not None:
                self._stop()
            if well:
                self._say_none(f"training ended after step {self._step:,}")
        elif self._profile is not None:
            self._write(" only, as training ended there")

    def _begin_if_due(self) -> None:
        if not self._step + 1 == self._first <= self._last:
            return
        heartbeat = self._processes.heartbeat
        with heartbeat.slowly("tracing"):
            self._profile = profile()
            try:
                self._profile.start()
            except RuntimeError as failure:
                self._give_up(failure)
                return
        self._listening.enter_context(heartbeat.listening(self._begin_phase))

    def _begin_phase(self, stage: str) -> None:
        """Show a phase, and a step that begins with it, in the trace."""
        self._phase.close()
        if stage == LOOKING_UP:
            self._of_step.close()
            step = self._processes.heartbeat.step
            self._of_step.enter_context(record_function(f"step {step}"))
        self._phase.enter_context(record_function(stage))

    def _stop(self) -> None:
        for stack in (self._listening, self._phase, self._of_step):
            stack.close()
        self._profile.stop()

    def _write(self, remark: str) -> None:
        unfinished = self._file.with_name(f".{self._file.name}")
        with self._processes.heartbeat.slowly("tracing"):
            try:
                self._stop()
                self._file.parent.mkdir(parents=True, exist_ok=True)
                remove(unfinished)
                self._profile.export_chrome_trace(str(unfinished))
                os.replace(unfinished, self._file)
            except (OSError, RuntimeError) as failure:
                self._give_up(failure)
                return
        # Free its events.
        self._profile = None
        self._say(f"steps {self._first:,} to {self._step:,} are traced{remark}: {self._file}")

    def _give_up(self, failure: Exception) -> None:
        self._profile = None
        say_given_up(self._processes.rank, self._file, "trace", failure)

    def _say_none(self, why: str) -> None:
        asked = f"steps {self._start:,} to {self._last:,}"
        self._say(f"train.profile asks for {asked}, but {why}: no trace is written")

    def _say(self, sentence: str) -> None:
        if self._processes.is_main:
            tqdm.write(sentence)
