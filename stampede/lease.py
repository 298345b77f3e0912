# pyright: basic
"""One process at a time that writes a URL of an object store."""

from __future__ import annotations

import errno
import json
import os
import socket
import time
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from threading import Event, Thread
from typing import Any
from uuid import uuid4

from tqdm.auto import tqdm

from stampede.files import parse_json
from stampede.store_access import (
    Seen,
    StoreError,
    connected,
    delete_object,
    read_object,
    replace_object,
    seen_object,
)


class Lease:
    """Keeps a URL to one process: `.NAME.lease` beside it, rewritten every few seconds.

    A process that was killed does not rewrite it, so the next one takes it over. No clock is
    compared: the next one looks at it for a while. A process that was cut off from the store
    meanwhile notices with `check`, and what it writes late does not replace what the next one
    has written. It has connections of its own, or it would wait for copies.
    """

    SECONDS, MISSED = 10.0, 3

    def __init__(self, url: str) -> None:
        """Take the lease. Raises a `StoreError` if another process holds it."""
        parent, _, name = url.rstrip("/").rpartition("/")
        is_bucket = parent.endswith(":/")
        self._url = f"{url.rstrip('/')}/.lease" if is_bucket else f"{parent}/.{name}.lease"
        self._of = url
        self._ended, self._beats, self._key = Event(), 0, uuid4().hex
        self._connect = cache(partial(connected, alone=True))
        try:
            holder = self._seen()
            if holder is not None:
                holder = self._wait_for(holder)
            compared = self._write(holder)
            # Two processes may have taken it over at once; the last to write has it.
            time.sleep(0.0 if holder is None and compared else self.SECONDS / 10)
            self.check()
        except StoreError as failure:
            if failure.filename != self._url:
                raise
            # Of what the user has named.
            raise StoreError(failure.errno, failure.strerror, url) from None
        self._thread = Thread(target=self._keep, daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise a `StoreError` if another process has taken the lease over."""
        self._check_in(read_object(self._url, self._connect))

    def _check_in(self, content: bytes | None) -> None:
        if self._key.encode() not in (content or b""):
            raise self._taken()

    def _seen(self) -> Seen | None:
        return seen_object(self._url, self._connect)

    def _taken(self) -> StoreError:
        reason = "was taken over by another run; end one of the two, or write to another place"
        return StoreError(errno.EBUSY, reason, self._of)

    def _wait_for(self, holder: Seen) -> Seen | None:
        """Wait until another process has ended, or raise; returns what it has left."""
        about = _described(holder[1])
        who, machine = "another process", _machine()
        if about:
            who = f"process {about['process']} on {about.get('host')}"
        if machine and about.get("machine") == machine and not _runs(about["process"]):
            return holder
        most = self.SECONDS * self.MISSED
        tqdm.write(f"{self._of} was being written by {who}; waiting {most:.0f} s for it to end")
        until = time.monotonic() + most
        while time.monotonic() < until:
            time.sleep(self.SECONDS / 10)
            now = self._seen()
            if now is None:
                return None
            if now[1] != holder[1]:
                reason = f"is being written by {who}; end it first, or write to another place"
                raise StoreError(errno.EBUSY, reason, self._of)
        return holder

    def _write(self, known: Seen | None) -> bool:
        """Replace what was seen; whether the store has compared it with what is there."""
        self._beats += 1
        about = {
            "host": socket.gethostname(),
            "process": os.getpid(),
            "machine": _machine(),
            "key": self._key,
            "beat": self._beats,
        }
        try:
            return replace_object(self._url, json.dumps(about).encode(), known, self._connect)
        except StoreError as failure:
            is_gone = known is not None and failure.errno == errno.ENOENT
            if failure.errno != errno.EEXIST and not is_gone:
                raise
        # There is another one; or ours, as a driver asks again whose first answer was lost.
        self.check()
        return True

    def _keep(self) -> None:
        while not self._ended.wait(self.SECONDS):
            try:
                asked = time.monotonic()
                seen = self._seen()
                self._check_in(seen and seen[1])
                # After a pause another process may have it; not all stores compare.
                if time.monotonic() - asked < self.SECONDS and not self._write(seen):
                    self.check()
            except StoreError as failure:
                # What cannot be reached is tried again at the next beat.
                if failure.errno == errno.EBUSY:
                    return

    def release(self) -> None:
        """Let the next process take it."""
        self._ended.set()
        self._thread.join()
        with suppress(StoreError):
            self.check()
            delete_object(self._url, self._connect)


def _described(holder: bytes) -> dict[str, Any]:
    """What a lease says of the process that holds it; of a damaged one nothing."""
    with suppress(ValueError, RecursionError):
        about = parse_json(holder)
        if isinstance(about, dict) and isinstance(about.get("process"), int):
            return about
    return {}


def _machine() -> str:
    """Where the numbers of processes mean the same: a boot of a machine, and its namespace."""
    found = []
    with suppress(OSError):
        found.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        found.append(os.readlink("/proc/self/ns/pid"))
    return " ".join(found)


def _runs(process: int) -> bool:
    """Whether a process of this machine is alive."""
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return True
