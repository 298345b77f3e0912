"""Ends a run that hangs, and names the stuck rank.

On every rank a thread watches the heartbeat and publishes the rank's status through the store of
the process group. A rank that makes no progress for too long reads the others' status. If none
makes progress, it names those that the others wait for, writes the stacks of its threads into the
run folder, and ends with status 3.
"""

from __future__ import annotations

import faulthandler
import json
import linecache
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from uuid import uuid4

import torch.distributed as dist

from stampede.engine.config import RunSection
from stampede.engine.exit_status import HUNG
from stampede.engine.processes import Processes, connection
from stampede.files import open_inside

# The first step may compile kernels.
_FIRST_STEP_SECONDS = 600.0

# Rounds without a new status after which a rank counts as silent; a busy machine misses some.
_SILENT_ROUNDS = 8

# Ranks start to read the others this many rounds before they judge.
_ROUNDS_READ = _SILENT_ROUNDS + 3

# At most this many ranks are named.
_NAMED = 8

_LIBRARIES = tuple(f"{os.sep}{name}{os.sep}distributed{os.sep}" for name in ("torch", "torchrec"))


@contextmanager
def watched(processes: Processes, settings: RunSection, folder: Path) -> Iterator[None]:
    """End the processes with status 3 if the run makes no progress within the context.

    All ranks must enter together. Time counts from the first heartbeat; the first step gets ten
    minutes more than `hang_seconds`.

    Args:
        folder: for the stacks of all threads.
    """
    if not settings.hang_seconds:
        yield
        return
    store = dist.HashStore()
    if processes.world_size > 1:
        # A new name, because the store of torchrun's agent outlives a restart.
        job = processes.on_main(lambda: uuid4().hex)
        store = dist.PrefixStore(f"stampede/watchdog/{job}", connection())
    watchdog = Watchdog(processes, settings, folder, store)
    try:
        yield
    finally:
        watchdog.close()


@dataclass(frozen=True)
class RankStatus:
    """Where a rank is, as published to the other ranks, see `Heartbeat`.

    Attributes:
        published: number of this message.
        still_seconds: since its last beat, without time while the process was stopped.
        hangs: whether that is too long.
        waits: whether it waits for other ranks.
    """

    published: int
    beats: int
    step: int
    stage: str
    still_seconds: float = 0.0
    hangs: bool = False
    waits: bool = False

    def __str__(self) -> str:
        return f"step {self.step}, {self.stage}"


class Watchdog:
    """A thread that watches this rank's heartbeat; ranks publish their status in the store."""

    def __init__(
        self, processes: Processes, settings: RunSection, folder: Path, store: dist.Store
    ) -> None:
        self._rank, self._world_size = processes.rank, processes.world_size
        self._heartbeat = processes.heartbeat
        self._settings, self._folder, self._store = settings, folder, store
        self._interval = min(5.0, settings.hang_seconds / 20)
        self._main = threading.get_ident()
        self._beats = self._start = self._heartbeat.beats
        self._is_first_step, self._is_slow = True, False
        self._still = 0.0
        self._published = 0
        # The status of all ranks in the newest rounds.
        self._read: deque[dict[int, RankStatus | None]] = deque(maxlen=_SILENT_ROUNDS + 1)
        self._end = threading.Event()
        self._publish()
        self._thread = threading.Thread(target=self._run, name="stampede-watchdog", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop watching."""
        self._end.set()
        self._thread.join(2 * self._interval)

    def _run(self) -> None:
        before = time.monotonic()
        while not self._end.wait(self._interval):
            now = time.monotonic()
            # Time while the process was stopped does not count.
            self._count(min(now - before, 2 * self._interval))
            before = now
            self._publish()
            reason = self._judge()
            if reason and not self._end.is_set():
                self._end_process(reason)

    def _count(self, seconds: float) -> None:
        # Read before the beats: the end of a slow stage must not be seen before its last beat.
        is_slow = self._heartbeat.slow
        beats = self._heartbeat.beats
        if beats == self._beats:
            # Nothing has begun before the first beat.
            self._still += seconds if beats > self._start else 0.0
        else:
            self._beats, self._still = beats, 0.0
            # Both are 0 in the evaluation at the start of a resumed run.
            self._is_first_step = self._heartbeat.step == self._heartbeat.first_step
        self._is_slow = is_slow

    def _left(self) -> float:
        """Seconds until this rank has been still for too long."""
        patience = self._settings.hang_seconds
        patience += _FIRST_STEP_SECONDS if self._is_first_step else 0.0
        if self._is_slow:
            patience = max(patience, self._settings.slow_hang_seconds)
        return patience - self._still

    def _status(self) -> RankStatus:
        heartbeat = self._heartbeat
        return RankStatus(
            published=self._published,
            beats=heartbeat.beats,
            step=heartbeat.step,
            stage=heartbeat.stage,
            still_seconds=self._still,
            hangs=self._left() <= 0,
            waits=bool(self._still) and waits_for_others(self._main),
        )

    def _publish(self) -> None:
        self._published += 1
        # If the store fails, the others notice the missing rounds.
        with suppress(RuntimeError):
            self._store.set(str(self._rank), json.dumps(asdict(self._status())))

    def _judge(self) -> str:
        """Why the run hangs; empty if it does not."""
        left = self._left()
        if left > _ROUNDS_READ * self._interval:
            self._read.clear()
            return ""
        # Without an answer, torchrun or the timeout of the collective ends the processes.
        with suppress(RuntimeError):
            self._read.append({rank: self._newest(rank) for rank in range(self._world_size)})
        if left > 0 or len(self._read) <= _SILENT_ROUNDS:
            return ""
        before, now = self._read[0], self._read[-1]
        return stuck_ranks(now, {rank for rank in now if now[rank] == before[rank]})

    def _newest(self, rank: int) -> RankStatus | None:
        """What a rank published last."""
        if not self._store.check([str(rank)]):
            return None
        return RankStatus(**json.loads(self._store.get(str(rank))))

    def _end_process(self, reason: str) -> None:
        settings = self._settings
        slow = self._is_slow and settings.slow_hang_seconds > settings.hang_seconds
        key = "slow_hang_seconds" if slow else "hang_seconds"
        after = f"run.{key}={getattr(settings, key):g}"
        sentence = (
            f"the run hangs: {reason}. After {after} its processes end with status {HUNG}; a "
            "restart by torchrun, or checkpoint.resume=auto, continues from the newest checkpoint; "
            f"stacks are in {self._folder / 'hang_rank_*.txt'}"
        )
        said = f"{sentence}\n\n{_stuck(self._rank, self._status())}\n\n"
        # The disk may be full.
        with suppress(OSError), open_inside(self._folder, f"hang_rank_{self._rank}.txt") as file:
            file.truncate(0)
            file.write(said.encode())
            faulthandler.dump_traceback(file, all_threads=True)
        is_first = True
        with suppress(RuntimeError):
            is_first = self._store.add("asked", 1) == 1
        if is_first:
            # Not sys.stderr, whose lock the main thread may hold.
            os.write(2, f"\nerror: {sentence}\n".encode())
        # Flushed in another thread, for the same reason.
        flushing = threading.Thread(target=sys.stdout.flush, daemon=True)
        flushing.start()
        flushing.join(1.0)
        # torchrun ends all processes as soon as one ends: give each time to write its stacks.
        time.sleep(3 * self._interval if self._world_size > 1 else 0.0)
        os._exit(HUNG)


def stuck_ranks(ranks: Mapping[int, RankStatus | None], silent: Collection[int] = ()) -> str:
    """The ranks that the others wait for, as a clause; empty while a rank makes progress.

    Args:
        ranks: the newest status of all ranks, None if there is none.
        silent: those whose status is old.
    """
    heard = {rank: at for rank, at in sorted(ranks.items()) if at and rank not in silent}
    if not all(at.hangs for at in heard.values()):
        return ""
    first = min(heard.values(), key=lambda at: at.beats)
    lost = [
        f"rank {rank} is stopped, dead or out of reach, or has left the training: "
        + (f"last heard of at {at}" if at else "never heard of")
        for rank, at in sorted(ranks.items())
        if rank not in heard
    ]
    if lost:
        return f"{_some(lost)}; the others wait at {first}"
    behind = {rank: at for rank, at in heard.items() if at.beats == first.beats}
    # Of ranks at the same place, those that do not wait for others are stuck.
    stuck = {rank: at for rank, at in behind.items() if not at.waits} or behind
    return _some([_stuck(rank, at) for rank, at in stuck.items()])


def _stuck(rank: int, at: RankStatus) -> str:
    return f"rank {rank} makes no progress: at {at}, for {at.still_seconds:.3g} s"


def _some(clauses: list[str]) -> str:
    more = [f"and {len(clauses) - _NAMED} more"] if len(clauses) > _NAMED else []
    return "; ".join([*clauses[:_NAMED], *more])


def waits_for_others(thread: int) -> bool:
    """Whether a thread, by its `ident`, waits for other ranks."""
    frame = sys._current_frames()[thread]
    # Waiting for an asynchronous collective is a call into C++, from any file.
    path = frame.f_code.co_filename
    in_wait = ".wait(" in linecache.getline(path, frame.f_lineno)
    return in_wait or any(library in path for library in _LIBRARIES)
