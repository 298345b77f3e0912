"""Where ranks tell each other their standings: the store of the process group."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

import torch.distributed as dist

from stampede.engine.watchdog.standing import Standing
from stampede.engine.watchdog.verdict import Seen

# A rank that has published nothing new for so many rounds is silent; a busy machine costs some.
SILENT_ROUNDS = 8


class Board:
    """Publishes this rank's standing and reads those of the others, in a thread of its own.

    Only that thread uses the store, which may never answer once its host is gone.

    Args:
        store: shared by all ranks and by nobody else.
        rank, world_size: this rank among all.
        interval: seconds between two rounds.
        standing: what this rank publishes.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        world_size: int,
        interval: float,
        standing: Callable[[], Standing],
    ) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._interval = interval
        self._standing = standing
        self._reads = False
        self._asks = False
        self._end = threading.Event()
        self._answered = threading.Event()
        self._is_first = True
        # What each rank published last, and in which round that was new.
        self._seen: dict[int, tuple[Standing | None, int]] = {}
        self._rounds = 0
        self._thread = threading.Thread(target=self._run, name="stampede-board", daemon=True)
        self._publish()
        self._thread.start()

    def close(self) -> None:
        """Publish the last standing and end, within some seconds."""
        self._end.set()
        self._thread.join(2 * self._interval)

    def read(self, wanted: bool) -> None:
        """Whether the others are read in each round from now on; it begins with a clean sheet."""
        if wanted and not self._reads:
            self._seen, self._rounds = {}, 0
        self._reads = wanted

    def others(self) -> dict[int, Seen] | None:
        """What is known of the other ranks; None if too little was read to judge, or nothing."""
        if self._rounds <= SILENT_ROUNDS:
            return None
        return {
            rank: Seen(standing, silent=self._rounds - new_in >= SILENT_ROUNDS)
            for rank, (standing, new_in) in dict(self._seen).items()
        }

    def is_first(self) -> bool:
        """Whether this rank is the first to ask this; True if the store does not answer."""
        self._asks = True
        self._answered.wait(3 * self._interval)
        return self._is_first

    def _run(self) -> None:
        # The store's host may be gone or not answer: it is seen from rounds that are missing.
        while not self._end.wait(self._interval):
            with contextlib.suppress(RuntimeError):
                self._round()
        with contextlib.suppress(RuntimeError):
            self._publish()

    def _round(self) -> None:
        self._publish()
        if self._asks and not self._answered.is_set():
            self._is_first = self._store.add("asked", 1) == 1
            self._answered.set()
        if self._reads:
            for rank in range(self._world_size):
                if rank != self._rank:
                    self._read(rank)
            self._rounds += 1

    def _publish(self) -> None:
        self._store.set(str(self._rank), self._standing().to_bytes())

    def _read(self, rank: int) -> None:
        key = str(rank)
        standing = None
        if self._store.check([key]):
            standing = Standing.from_bytes(self._store.get(key))
        known = self._seen.get(rank)
        if known is None or known[0] != standing:
            self._seen[rank] = standing, self._rounds
