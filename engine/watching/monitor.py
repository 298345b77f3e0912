"""Monitors training: step times by phase, the slowest rank, a log and a trace per rank."""

from __future__ import annotations

import os
import platform
import sys
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import datetime, timezone
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.profiler import ProfilerAction, profile, record_function
from tqdm import tqdm

from stampede.engine.checkpoint.manifest import versions
from stampede.engine.config import Config, ProfileSection
from stampede.engine.console import readable_bytes
from stampede.engine.errors import InterruptedRunError
from stampede.engine.processes import Processes, peak_memory_bytes
from stampede.engine.start_up import restarts
from stampede.engine.watching.heartbeat import EXCHANGES, PHASES, READING
from stampede.files import append, to_json

# Steps by which a GPU may be behind when their events are read; it is never that far.
_HELD = 16

# Stands for a stage where a step's wait in a collective is noted.
_WAIT = "waiting"

_PERCENTILES = {"p50": 50, "p90": 90, "p99": 99, "max": 100}


class Clock:
    """The time of a device: the host's, or events on a GPU's training stream.

    If the stream idles because the host is late, that time counts for the stage in which it was.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

    def mark(self) -> Any:
        """The time at which the device gets here."""
        if self._stream is None:
            return time.perf_counter()
        return self._stream.record_event(torch.cuda.Event(enable_timing=True))

    def seconds(self, first: Any, last: Any) -> float:
        """Seconds between two marks; waits for the last one."""
        if self._stream is None:
            return last - first
        last.synchronize()
        return first.elapsed_time(last) / 1e3


class PhaseTimes:
    """Takes the time at every heartbeat, see `Heartbeat.listening`.

    A step begins where the previous one ended: with reading and sending its batch. A step that
    diverged counts for the next one.

    Args:
        exchanges: phases that consist of collectives; all their time counts as waited.
    """

    def __init__(self, clock: Clock, exchanges: Collection[str] = ()) -> None:
        self.clock, self._exchanges = clock, exchanges
        self._stage, self._since = "starting", clock.mark()
        # Stages and waits of the current step with their first and last marks; steps not yet read.
        self._step: list[tuple[str, Any, Any]] = []
        self._ended: deque[list[tuple[str, Any, Any]]] = deque()
        # Of the window: seconds of each step, and in all by stage.
        self._seconds: list[float] = []
        self._by_stage: Counter[str] = Counter()

    def begin(self, stage: str) -> None:
        """A stage begins, and the previous one ends."""
        # An evaluation beats at each of its batches.
        if stage != self._stage:
            self._end_stage(stage)

    def _end_stage(self, following: str) -> None:
        now = self.clock.mark()
        self._step.append((self._stage, self._since, now))
        self._stage, self._since = following, now

    def waited(self, since: Any) -> None:
        """A wait in a collective ends."""
        if self._stage in PHASES and self._stage not in self._exchanges:
            self._step.append((_WAIT, since, self.clock.mark()))

    def end_step(self) -> None:
        """A step ends, and the next begins in the same stage."""
        self._end_stage(self._stage)
        self._ended.append(self._step)
        self._step = []
        if len(self._ended) > _HELD:
            self._add(self._ended.popleft())

    def take(self) -> dict[str, Any]:
        """Times of the steps that ended since the last call, at least one; waits for the GPU.

        Phases and communication are means over the steps, stages outside of steps are totals.
        """
        while self._ended:
            self._add(self._ended.popleft())
        seconds, self._seconds = self._seconds, []
        by_stage, self._by_stage = self._by_stage, Counter()
        percentiles = np.percentile(seconds, list(_PERCENTILES.values())).tolist()
        phases = {name: by_stage[name] / len(seconds) for name in PHASES}
        waited = sum(by_stage[name] for name in (_WAIT, *self._exchanges))
        shown = dict(zip(_PERCENTILES, percentiles, strict=True))
        return {
            "steps": len(seconds),
            "step_seconds": {**shown, "mean": sum(phases.values())},
            "phase_seconds": phases,
            "communication_seconds": waited / len(seconds),
            "outside_seconds": {n: s for n, s in by_stage.items() if n not in (_WAIT, *PHASES)},
        }

    def _add(self, step: list[tuple[str, Any, Any]]) -> None:
        self._seconds.append(0.0)
        for name, first, last in step:
            seconds = self.clock.seconds(first, last)
            self._by_stage[name] += seconds
            if name in PHASES:
                self._seconds[-1] += seconds


@contextmanager
def waits_counted(times: PhaseTimes) -> Iterator[None]:
    """Measure how long this thread and its backward passes wait for collectives.

    All collectives of torch.distributed and TorchRec end in `Work.wait`, which this replaces: torch
    has no hook for it on gloo. On a CPU the wait ends when the data arrive, so it includes the time
    for slower ranks. On a GPU it is the time that the stream waits.
    """
    original, thread = dist.Work.wait, threading.get_ident()

    def wait(work: dist.Work, *arguments: Any, **options: Any) -> Any:
        # A thread that writes a checkpoint does not count; autograd's own threads on a GPU do.
        if threading.get_ident() != thread and torch._C._current_graph_task_id() == -1:
            return original(work, *arguments, **options)
        since = times.clock.mark()
        try:
            return original(work, *arguments, **options)
        finally:
            times.waited(since)

    dist.Work.wait = wait
    try:
        yield
    finally:
        dist.Work.wait = original


def over_ranks(windows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Fields of a line of `metrics.jsonl`, from the windows of all ranks, see `PhaseTimes.take`.

    Percentiles and memory are the largest of any rank, phases and communication the means. The
    slowest rank is the one that waited least, beside the mean of the others.
    """
    phases = {name: fmean(w["phase_seconds"][name] for w in windows) for name in PHASES}
    largest = {name: max(w["step_seconds"][name] for w in windows) for name in _PERCENTILES}
    own = [w["step_seconds"]["mean"] - w["communication_seconds"] for w in windows]
    rank = own.index(max(own))
    others = own[:rank] + own[rank + 1 :]
    slowest = {"rank": rank, "own": own[rank], "others": fmean(others) if others else None}
    return {
        "step_seconds": {**largest, "mean": sum(phases.values()), "steps": windows[0]["steps"]},
        "phase_seconds": phases,
        "communication_seconds": fmean(w["communication_seconds"] for w in windows),
        "slowest_seconds": slowest,
        "peak_memory_bytes": max(w["peak_memory_bytes"] for w in windows),
    }


def sentence_of(line: Mapping[str, Any], processes: Processes) -> str:
    """A line of `over_ranks`, for the console."""

    def ms(seconds: float) -> str:
        return f"{1e3 * seconds:,.3g} ms" if seconds < 1 else f"{seconds:,.3g} s"

    steps, mean = line["step_seconds"], line["step_seconds"]["mean"]
    times = ", ".join(f"{name} {ms(steps[name])}" for name in _PERCENTILES)
    parts = [
        f"step {line['step']:,}: {times}",
        f"reading {line['phase_seconds'][READING] / mean:.1%}",
    ]
    if processes.world_size > 1:
        slowest = line["slowest_seconds"]
        parts += [
            f"communication {line['communication_seconds'] / mean:.1%}",
            f"slowest {processes.named(slowest['rank'])}: {ms(slowest['own'])} without waiting, "
            f"the others {ms(slowest['others'])}",
        ]
    return "; ".join([*parts, f"memory {readable_bytes(line['peak_memory_bytes'])}"])


class StepTrace:
    """Traces the steps that `train.profile` asks for, with their phases, into a file per rank.

    Perfetto and TensorBoard read it.
    """

    def __init__(self, settings: ProfileSection, processes: Processes, folder: Path) -> None:
        self._asked = range(settings.start, settings.start + settings.steps)
        self._processes = processes
        self._file = folder / "profile" / f"rank_{processes.rank}.pt.trace.json.gz"
        self._first = self._step = 0
        self._profile: profile | None = None
        self._phase = ExitStack()

    def after_step(self, step: int) -> None:
        """Training begins after a step, or the step has ended; all ranks call it."""
        self._step, following = step, step + 1
        if self._profile is not None and following not in self._asked:
            self._write()
        elif self._profile is None and following in self._asked and not self._first:
            self._first = following
            # With a schedule it marks each step by its number, for TensorBoard.
            self._profile = profile(schedule=lambda _: ProfilerAction.RECORD)
            self._profile.step_num = following
            with self._processes.heartbeat.slowly("tracing"):
                self._profile.start()

    def begin_phase(self, stage: str) -> None:
        """Show a phase in the trace, and a step that begins with it."""
        if self._profile is not None:
            self._phase.close()
            if self._processes.heartbeat.step > self._profile.step_num:
                self._profile.step()
            self._phase.enter_context(record_function(stage))

    def close(self) -> None:
        """The run ends: write the trace so far."""
        if self._profile is not None:
            self._write()
        is_traced = 0 < self._first <= self._step
        if self._asked and not is_traced and not self._file.is_file():
            self._say(
                f"train.profile asks for steps {self._asked[0]:,} to {self._asked[-1]:,}, but "
                f"training ended after step {self._step:,} without them: no trace is written"
            )

    def _write(self) -> None:
        traced, self._profile = self._profile, None
        self._phase.close()
        with self._processes.heartbeat.slowly("tracing"):
            traced.stop()
            if self._step < self._first:
                return
            try:
                self._file.parent.mkdir(parents=True, exist_ok=True)
                # The ending tells torch to compress it.
                traced.export_chrome_trace(str(self._file))
            except (OSError, RuntimeError) as failure:
                _say_given_up(self._processes.rank, self._file, "trace", failure)
            else:
                self._say(f"steps {self._first:,} to {self._step:,} are traced: {self._file}")

    def _say(self, sentence: str) -> None:
        if self._processes.is_main:
            tqdm.write(sentence)


def _say_given_up(rank: int, path: Path, what: str, failure: Exception) -> None:
    why = getattr(failure, "strerror", None) or failure
    print(
        f"rank {rank}: {path}: the {what} cannot be written ({why}); training continues without it",
        file=sys.stderr,
        flush=True,
    )


class Monitor:
    """Logs and times the steps of a run; a context around its training loop.

    Each rank logs its start and end and, every `train.timing_every` steps and at the end of an
    epoch, its step times since the last time. All ranks must call the methods at the same places.

    Args:
        step: the last step of earlier starts of the run.
    """

    def __init__(self, config: Config, processes: Processes, folder: Path, step: int) -> None:
        self._processes = processes
        self._step = step
        self._every = config.train.timing_every
        self._folder = folder
        # None once it cannot be written.
        self._log: Path | None = folder / "logs" / f"rank_{processes.rank}.jsonl"
        self._trace = StepTrace(config.train.profile, processes, folder)
        self._stack = ExitStack()
        self._times: PhaseTimes | None = None
        if self._every:
            exchanges = EXCHANGES if processes.device.type == "cuda" else ()
            self._times = PhaseTimes(Clock(processes.device), exchanges)

    def __enter__(self) -> Monitor:
        processes, device = self._processes, str(self._processes.device)
        if processes.device.type == "cuda":
            device += f" {torch.cuda.get_device_name(processes.device)}"
        self._write(
            "started",
            step=self._step,
            world_size=processes.world_size,
            device=device,
            host=platform.node(),
            process=os.getpid(),
            restart=restarts(),
            versions={"python": platform.python_version(), **versions()},
        )
        self._trace.after_step(self._step)
        self._stack.enter_context(processes.heartbeat.listening(self._trace.begin_phase))
        if self._times is not None:
            self._stack.enter_context(processes.heartbeat.listening(self._times.begin))
            self._stack.enter_context(waits_counted(self._times))
        return self

    def __exit__(self, _kind: object, failure: BaseException | None, _trace: object) -> None:
        at = {"step": self._step, "stage": self._processes.heartbeat.stage}
        self._stack.close()
        self._trace.close()
        if failure is None:
            self._write("ended", **at)
        elif isinstance(failure, InterruptedRunError):
            self._write("stopped", **at, reason=str(failure))
        else:
            lines = traceback.format_exception(failure)
            self._write("failed", **at, reason=str(failure), traceback="".join(lines))

    def after_step(self, step: int) -> None:
        """Call it after each step."""
        self._step = step
        if self._times is not None:
            self._times.end_step()
        self._trace.after_step(step)

    def line(self, step: int, ended: bool) -> dict[str, Any] | None:
        """A line for `metrics.jsonl` if one is due: after some steps, and where an epoch `ended`.

        Rank 0's has the fields of `over_ranks`, others' only `kind` and `step`.
        """
        if self._times is None or not (ended or step % self._every == 0):
            return None
        processes = self._processes
        window = self._times.take()
        window["peak_memory_bytes"] = peak_memory_bytes(processes.device)
        self._write("timing", step=step, **window)
        line = {"kind": "timing", "step": step}
        windows = [None] * processes.world_size if processes.is_main else None
        dist.gather_object(window, windows)
        if windows is not None:
            line |= over_ranks(windows)
            if step % self._every == 0:
                tqdm.write(sentence_of(line, processes))
        return line

    def _write(self, event: str, **fields: Any) -> None:
        """Append a line to the rank's log, as long as it can be written."""
        if self._log is None:
            return
        rank = self._processes.rank
        now = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
        line = to_json({"time": now, "rank": rank, "event": event, **fields})
        try:
            append(self._folder, str(self._log.relative_to(self._folder)), f"{line}\n".encode())
        except OSError as failure:
            _say_given_up(rank, self._log, "log", failure)
            self._log = None
