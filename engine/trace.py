"""A trace of some steps by torch.profiler, a file for each rank."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from torch.profiler import profile, record_function
from tqdm.auto import tqdm

from stampede.engine.config import ProfileSection
from stampede.engine.console import say_given_up
from stampede.engine.processes import Processes
from stampede.engine.pulse import LOOKING_UP


def trace_file(folder: Path, rank: int) -> Path:
    """The trace of a rank in the folder of a run; Perfetto and TensorBoard read it."""
    return folder / "profile" / f"rank_{rank}.pt.trace.json.gz"


class StepTrace:
    """Traces the steps that `train.profile` asks for, with their phases.

    Each rank traces the same steps. A trace that cannot be written is given up with a sentence.

    Args:
        settings: which steps.
        processes: this rank among all, whose pulse names the phases.
        folder: of the run.
        step: the last one that earlier starts of the run have taken.
    """

    def __init__(
        self, settings: ProfileSection, processes: Processes, folder: Path, step: int
    ) -> None:
        self._processes = processes
        self._file = trace_file(folder, processes.rank)
        self._first = max(settings.start, step + 1)
        self._last = settings.start + settings.steps - 1
        self._asked = f"train.profile asks for steps {settings.start:,} to {self._last:,}"
        self._step = step
        self._profile: profile | None = None
        self._prepared = self._begun = self._records = self._given_up = False
        self._phase, self._of_step, self._listening = ExitStack(), ExitStack(), ExitStack()
        # What is done next depends on steps alone: all ranks do the same, whoever gives up.
        self._done = not settings.steps or self._last <= step
        if settings.steps and self._done and not self._file.is_file():
            self._say(f"{self._asked}, but {step:,} are done already: no trace is written")
        self._begin_if_due()

    def after_step(self, step: int) -> None:
        """A step has ended; all ranks call it after each."""
        self._step = step
        if self._done:
            return
        if step == self._last:
            self._end()
        elif self._begun:
            self._phase.close()
            self._of_step.close()
            self._begin_phase(self._processes.pulse.stage)
        else:
            self._begin_if_due()

    def close(self, well: bool) -> None:
        """The run ends here; what was traced so far is written.

        Args:
            well: whether it has not failed.
        """
        if self._done:
            return
        self._name_no_more()
        if self._begun and self._step >= self._first:
            self._end(" only, as training ended there")
            return
        self._done = True
        if self._prepared:
            self._try(self._stop)
        if well:
            self._say(
                f"{self._asked}, but training ended after step {self._step:,}: no trace is written"
            )

    def _begin_if_due(self) -> None:
        """Begin to record with the coming step, and prepare for it a step earlier."""
        coming = self._step + 1
        if self._done or coming < self._first - 1:
            return
        with self._processes.pulse.slowly("tracing"):
            if not self._prepared:
                self._prepared = True
                self._try(self._prepare)
            if coming == self._first:
                self._try(self._start)
        if coming == self._first:
            self._begun = True
            self._listening.enter_context(self._processes.pulse.listening(self._begin_phase))

    def _begin_phase(self, stage: str) -> None:
        """Let the trace show it, and the step that begins with it."""
        self._phase.close()
        if stage == LOOKING_UP:
            self._of_step.close()
            self._of_step.enter_context(record_function(f"step {self._processes.pulse.step}"))
        self._phase.enter_context(record_function(stage))

    def _name_no_more(self) -> None:
        for stack in (self._listening, self._phase, self._of_step):
            stack.close()

    def _end(self, remark: str = "") -> None:
        self._done = True
        self._name_no_more()
        with self._processes.pulse.slowly("tracing"):
            self._try(self._stop)
            self._try(lambda: self._write(remark))
        # It holds all events.
        self._profile = None

    def _prepare(self) -> None:
        self._profile = profile()
        self._profile.prepare_trace()

    def _start(self) -> None:
        self._profile.start_trace()
        self._records = True

    def _stop(self) -> None:
        # What is only prepared cannot be stopped.
        if not self._records:
            self._start()
        self._profile.stop_trace()

    def _write(self, remark: str) -> None:
        unfinished = self._file.with_name(f".{self._file.name}")
        self._file.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._profile.export_chrome_trace(str(unfinished))
            os.replace(unfinished, self._file)
        finally:
            unfinished.unlink(missing_ok=True)
        self._say(f"steps {self._first:,} to {self._step:,} are traced{remark}: {self._file}")

    def _try(self, action: Callable[[], object]) -> None:
        """Do it unless the trace was given up, and give it up where it fails."""
        if self._given_up:
            return
        try:
            action()
        except (OSError, RuntimeError) as failure:
            self._given_up = True
            say_given_up(self._processes.rank, self._file, "trace", failure)

    def _say(self, sentence: str) -> None:
        if self._processes.is_main:
            tqdm.write(sentence)
