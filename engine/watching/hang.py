"""Ends a run that hangs, and names the stuck rank.

On every rank a thread watches the heartbeat with a clock of its own, and exchanges the ranks'
statuses through the store of the process group. A rank that makes no progress for too long
looks at the others' statuses. If none makes progress, or one is not heard of, it names those that
it waits for, writes the stacks of its threads into the run folder, and ends with status 3.
"""

from __future__ import annotations

import faulthandler
import json
import linecache
import os
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TypeVar
from uuid import uuid4

import torch.distributed as dist

from stampede.engine.config import RunSection
from stampede.engine.exit_status import HUNG
from stampede.engine.processes import Processes, connection
from stampede.files import open_inside

T = TypeVar("T")
# Names a rank in a sentence.
Named = Callable[[int], str]

# The first step may compile kernels.
_FIRST_STEP_SECONDS = 600.0

# Rounds without a new status after which a rank counts as silent; a busy machine misses some.
_SILENT_ROUNDS = 8

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
        still_seconds: since its last beat, without time while the process was stopped.
        hangs: whether that is too long.
        waits: whether it waits for other ranks.
        published: number of this message, by which others see that the process is there.
    """

    beats: int
    step: int
    stage: str
    still_seconds: float = 0.0
    hangs: bool = False
    waits: bool = False
    published: int = 0

    def __str__(self) -> str:
        return f"step {self.step}, {self.stage}"


class Watchdog:
    """A thread that watches this rank's heartbeat, and the silence of other ranks and the store."""

    def __init__(
        self, processes: Processes, settings: RunSection, folder: Path, store: dist.Store
    ) -> None:
        self._processes = processes
        self._rank, self._world_size = processes.rank, processes.world_size
        self._heartbeat = processes.heartbeat
        self._settings, self._folder, self._store = settings, folder, store
        self._interval = min(5.0, settings.hang_seconds / 20)
        self._main = threading.get_ident()
        self._beats = self._start = self._heartbeat.beats
        self._is_first_step, self._is_slow = True, False
        self._still = 0.0
        # What each rank has published last, as far as it was read, and how long this rank had been
        # still by then. Its own message tells whether the store answers.
        self._statuses: dict[int, RankStatus] = {}
        self._heard: dict[int, float] = {}
        self._published = 0
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="stampede-watchdog", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop watching."""
        self._end.set()
        self._thread.join(2 * self._interval)

    def _run(self) -> None:
        before, call = time.monotonic(), None
        while not self._end.wait(self._interval):
            now = time.monotonic()
            # Time while the process was stopped does not count.
            self._count(min(now - before, 2 * self._interval))
            before = now
            # It may wait for a quarter of an hour if the network or the store's host is gone.
            if call is None or not call.is_alive():
                call = threading.Thread(target=self._exchange, daemon=True)
                call.start()
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
            self._heard = {}
            # Both are 0 in the evaluation at the start of a resumed run.
            self._is_first_step = self._heartbeat.step == self._heartbeat.first_step
        self._is_slow = is_slow

    def _exchange(self) -> None:
        """Publish this rank's status, and read all if it makes no progress."""
        self._published += 1
        status = replace(self._status(), published=self._published)
        # The store may be gone; others see that this rank is silent, and this one that they are.
        with suppress(RuntimeError):
            self._store.set(str(self._rank), json.dumps(asdict(status)))
            for rank in range(self._world_size if status.still_seconds else 0):
                if not self._store.check([str(rank)]):
                    continue
                found = RankStatus(**json.loads(self._store.get(str(rank))))
                if found.published != getattr(self._statuses.get(rank), "published", 0):
                    self._heard[rank] = self._still
                self._statuses[rank] = found

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
            beats=heartbeat.beats,
            step=heartbeat.step,
            stage=heartbeat.stage,
            still_seconds=self._still,
            hangs=self._left() <= 0,
            waits=bool(self._still) and waits_for_others(self._main),
        )

    def _judge(self) -> str:
        """Why the run hangs; empty if it does not."""
        # However long a stage may take, a process that is there says so in every round.
        lost = self._silent_for(self._settings.hang_seconds)
        if not lost and self._left() > 0:
            return ""
        silent = lost or self._silent_for(_SILENT_ROUNDS * self._interval)
        if self._rank in silent:
            return self._without_store()
        named = self._processes.named
        ranks = {**self._statuses, self._rank: self._status()}
        heard = {rank: at for rank, at in ranks.items() if rank not in silent}
        if lost or (silent and all(at.hangs for at in heard.values())):
            return lost_ranks(ranks, silent, named)
        return stuck_ranks(heard, named)

    def _silent_for(self, seconds: float) -> set[int]:
        still, heard = self._still, self._heard
        return {r for r in range(self._world_size) if still - heard.get(r, 0.0) >= seconds}

    def _without_store(self) -> str:
        """What this rank waits for if it cannot hear of the others."""
        at, hosts = os.environ.get("MASTER_ADDR"), self._processes.hosts
        others = [host for host in dict.fromkeys(hosts) if host != hosts[self._rank]]
        return (
            f"{self._processes.named(self._rank)} waits at {self._status()}"
            + (f" for {' and '.join(others[:_NAMED])}" if others else "")
            + f", and torchrun's store{f' at {at}' if at else ''}, where it would hear of the "
            "other ranks, does not answer: that host or the network between them is down"
        )

    def _end_process(self, reason: str) -> None:
        settings = self._settings
        slow = self._is_slow and settings.slow_hang_seconds > settings.hang_seconds
        slow &= self._left() <= 0
        key = "slow_hang_seconds" if slow else "hang_seconds"
        after = f"run.{key}={getattr(settings, key):g}"
        sentence = (
            f"the run hangs: {reason}. After {after} its processes end with status {HUNG}; a "
            "restart by torchrun, or checkpoint.resume=auto, continues from the newest checkpoint"
        )
        said = f"{sentence}\n\n{_stuck(self._rank, self._status(), self._processes.named)}\n\n"
        # The disk may be full, on a host that is gone, or the folder not made yet.
        if _within(self._interval, lambda: self._write_stacks(said)):
            sentence += f"; stacks are in {self._folder / 'hang_rank_*.txt'}"
        # All ranks say the same; True also if the store does not answer.
        if _within(self._interval, lambda: self._store.add("say", 1)) in (None, 1):
            # Not sys.stderr, whose lock the main thread may hold.
            os.write(2, f"\nerror: {sentence}\n".encode())
        # In another thread, for the same reason.
        _within(1.0, sys.stdout.flush)
        # torchrun ends all processes as soon as one ends: give each time to write its stacks.
        time.sleep(3 * self._interval if self._world_size > 1 else 0.0)
        os._exit(HUNG)

    def _write_stacks(self, said: str) -> bool:
        with suppress(OSError), open_inside(self._folder, f"hang_rank_{self._rank}.txt") as file:
            file.truncate(0)
            file.write(said.encode())
            faulthandler.dump_traceback(file, all_threads=True)
            return True
        return False


def _within(seconds: float, action: Callable[[], T]) -> T | None:
    """What `action` returns; None if it fails or takes longer, and then it goes on in a thread."""
    found = []

    def act() -> None:
        with suppress(RuntimeError):
            found.append(action())

    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    thread.join(seconds)
    return found[0] if found else None


def lost_ranks(ranks: Mapping[int, RankStatus], silent: Collection[int], named: Named) -> str:
    """The ranks that say nothing any more, as a clause.

    Args:
        ranks: the newest status of ranks.
        silent: those whose status is old.
        named: a rank for a sentence.
    """
    lost = [
        f"{named(rank)} is stopped, dead or out of reach, or has left the training: "
        + (f"last heard of at {ranks[rank]}" if rank in ranks else "never heard of")
        for rank in sorted(silent)
    ]
    first = min((at for rank, at in ranks.items() if rank not in silent), key=lambda at: at.beats)
    return f"{_some(lost)}; the others wait at {first}"


def stuck_ranks(ranks: Mapping[int, RankStatus], named: Named) -> str:
    """The ranks that the others wait for, as a clause; empty while a rank makes progress.

    Args:
        ranks, named: see `lost_ranks`.
    """
    if not all(at.hangs for at in ranks.values()):
        return ""
    first = min(at.beats for at in ranks.values())
    behind = {rank: at for rank, at in sorted(ranks.items()) if at.beats == first}
    # Of ranks at the same place, those that do not wait for others are stuck.
    stuck = {rank: at for rank, at in behind.items() if not at.waits} or behind
    return _some([_stuck(rank, at, named) for rank, at in stuck.items()])


def _stuck(rank: int, at: RankStatus, named: Named) -> str:
    return f"{named(rank)} makes no progress: at {at}, for {at.still_seconds:.3g} s"


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
