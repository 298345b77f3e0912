"""Ends the processes of a run that hangs, and says which rank the others wait for."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from uuid import uuid4

import torch.distributed as dist

from stampede.engine.config.sections import RunSection
from stampede.engine.exit_status import HUNG
from stampede.engine.processes import Processes
from stampede.engine.pulse import Pulse
from stampede.engine.watchdog.board import SILENT_ROUNDS, Board
from stampede.engine.watchdog.last_words import end_process, stack_file, what_happens_now
from stampede.engine.watchdog.standing import Standing, place_of
from stampede.engine.watchdog.verdict import Seen, Verdict, find_culprits

# Kernels may be compiled in the first step.
_FIRST_STEP_SECONDS = 600.0

# So many rounds before it is time to judge, the others are read.
_ROUNDS_READ = SILENT_ROUNDS + 3


@contextmanager
def watched(processes: Processes, settings: RunSection, folder: Path) -> Iterator[None]:
    """End the processes with status 3 if the run stands still in the context.

    It counts from the first beat of `processes.pulse` on. All ranks must enter together.

    Args:
        settings: `hang_seconds` without a beat on any rank, in the first step ten minutes more;
            `slow_hang_seconds` in a stage that may well last for hours, see `Pulse.slowly`.
        folder: of the run, for the stacks of all threads.
    """
    if not settings.hang_seconds:
        yield
        return
    # Stores of torchrun's agent outlive a restart.
    job = processes.on_main(lambda: uuid4().hex)
    store = None
    if processes.world_size > 1:
        store = dist.PrefixStore(f"stampede/watchdog/{job}", _own_client())
    watchdog = Watchdog(processes, settings, folder, store)
    try:
        yield
    finally:
        watchdog.close()


def _own_client() -> dist.Store:
    """A connection to the store of the process group that nothing else waits on."""
    return dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=False,
        wait_for_workers=False,
        timeout=timedelta(seconds=30),
    )


class Watchdog:
    """A thread that looks at this rank's pulse.

    Args:
        processes: this rank among all, and its pulse.
        settings: see `watched`.
        folder: of the run.
        store: for the ranks' standings; None in a run of one process.
    """

    def __init__(
        self, processes: Processes, settings: RunSection, folder: Path, store: dist.Store | None
    ) -> None:
        self._rank = processes.rank
        self._pulse: Pulse = processes.pulse
        self._patience = settings.hang_seconds
        self._slow_patience = settings.slow_hang_seconds
        self._interval = min(5.0, self._patience / 20)
        self._folder = folder
        self._main = threading.get_ident()
        self._beats = self._start = self._pulse.beats
        self._is_first_step = True
        self._is_slow = False
        self._still = 0.0
        self._published = 0
        self._end = threading.Event()
        self._board: Board | None = None
        if store is not None:
            self._board = Board(
                store, self._rank, processes.world_size, self._interval, self._standing
            )
        self._thread = threading.Thread(target=self._run, name="stampede-watchdog", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop watching; the others hear that this rank's loop has ended."""
        self._end.set()
        self._thread.join()
        if self._board is not None:
            self._board.close()

    def _run(self) -> None:
        before = time.monotonic()
        while not self._end.wait(self._interval):
            now = time.monotonic()
            # Time in which this process was stopped is none in which it made no progress.
            self._count(min(now - before, 2 * self._interval))
            before = now
            verdict = self._judge()
            if verdict is not None and not self._end.is_set():
                self._end_process(verdict)

    def _count(self, seconds: float) -> None:
        # Before the beats: who sees that a slow stage has ended also sees the beat at its end.
        is_slow = self._pulse.slow
        beats = self._pulse.beats
        if beats == self._beats:
            # Nothing has begun yet before the first beat.
            self._still += seconds if beats > self._start else 0.0
        else:
            self._beats, self._still = beats, 0.0
            # Both are 0 before it, as in the evaluation that a resumed run begins with.
            self._is_first_step = self._pulse.step == self._pulse.first_step
        self._is_slow = is_slow

    def _left(self) -> float:
        """Seconds until this rank has stood still for too long."""
        patience = self._patience + (_FIRST_STEP_SECONDS if self._is_first_step else 0.0)
        return (max(patience, self._slow_patience) if self._is_slow else patience) - self._still

    def _judge(self) -> Verdict | None:
        left = self._left()
        if self._board is None:
            return find_culprits({self._rank: Seen(self._standing())}) if left <= 0 else None
        self._board.read(left <= _ROUNDS_READ * self._interval)
        if left > 0:
            return None
        others = self._board.others()
        if others is not None:
            return find_culprits({self._rank: Seen(self._standing()), **others})
        if left > -_ROUNDS_READ * self._interval:
            return None
        at = self._standing()
        return Verdict(
            [],
            f"rank {self._rank} stands still at step {at.step}, {at.stage} ({at.place}), for "
            f"{at.still_seconds:.3g} s, and the store of the process group does not answer: the "
            "machine of rank 0 or its torchrun is gone",
        )

    def _standing(self) -> Standing:
        pulse = self._pulse
        self._published += 1
        place, waits = place_of(self._main) if self._still else ("", False)
        return Standing(
            published=self._published,
            beats=pulse.beats,
            step=pulse.step,
            stage=pulse.stage,
            still_seconds=self._still,
            hangs=self._left() <= 0,
            place=place,
            waits=waits,
            ended=self._end.is_set(),
        )

    def _end_process(self, verdict: Verdict) -> None:
        after = f"run.hang_seconds={self._patience:g}"
        if self._is_slow and self._slow_patience > self._patience:
            after = f"run.slow_hang_seconds={self._slow_patience:g}"
        sentence = (
            f"the run hangs: {verdict.reason}. After {after} "
            f"{what_happens_now(HUNG)}; stacks are in "
            f"{stack_file(self._folder, self._rank).with_name('hang_rank_*.txt')}"
        )
        alone = self._board is None
        is_first = (lambda: True) if alone else self._board.is_first
        # torchrun ends all processes as soon as one does; each is to leave its last words.
        end_process(
            HUNG,
            sentence,
            f"step {self._pulse.step}, {self._pulse.stage}",
            self._folder,
            self._rank,
            is_first,
            0.0 if alone else 3 * self._interval,
        )
