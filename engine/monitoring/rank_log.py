"""The log of a rank: a line of JSON for whatever is worth knowing of it later."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable
from datetime import datetime, timezone
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any

from stampede.engine.monitoring.giving_up import say_given_up
from stampede.engine.whole_files import to_json

# Of a file; the one before is kept as well. That is some 20,000 lines of timing.
_MOST_BYTES = 16 << 20


def log_file(folder: Path, rank: int) -> Path:
    """The log of a rank in the folder of a run."""
    return folder / "logs" / f"rank_{rank}.jsonl"


class RankLog:
    """Appends lines to `logs/rank_0.jsonl` and so on, each handed to the system as a whole.

    So a kill loses none. A log that cannot be written is given up with a sentence: no run ends
    for it. A file of 16 MiB becomes `rank_0.jsonl.1`, in place of the one before.

    Args:
        folder: of the run.
        rank: whose log it is.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self._path = log_file(folder, rank)
        self._rank = rank
        self._handler: _Handler | None = None
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            cut = _ends_amid_a_line(self._path)
            self._handler = _Handler(self._path, self._give_up)
            if cut:
                # The disk was full, or the machine lost power.
                self._handler.stream.write("\n")
        except OSError as failure:
            self._give_up(failure)

    def write(self, event: str, **fields: Any) -> None:
        """Append a line.

        Args:
            event: what it tells of, such as `timing`.
            fields: JSON; numbers that are not finite become null.
        """
        if self._handler is None:
            return
        now = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
        line = to_json({"time": now, "rank": self._rank, "event": event, **fields})
        self._handler.handle(logging.makeLogRecord({"msg": line}))

    def close(self) -> None:
        """Nothing is written any more."""
        handler, self._handler = self._handler, None
        if handler is not None:
            # What could not be written before is tried once more.
            with contextlib.suppress(OSError):
                handler.close()

    def _give_up(self, failure: BaseException | None) -> None:
        self.close()
        say_given_up(self._rank, self._path, "log", failure)


class _Handler(RotatingFileHandler):
    """logging's, which flushes after every line, with failures as told to `give_up`."""

    def __init__(self, path: Path, give_up: Callable[[BaseException | None], None]) -> None:
        super().__init__(path, maxBytes=_MOST_BYTES, backupCount=1, encoding="utf-8")
        self._tell = give_up

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        """Called by logging within the handling of an exception."""
        self._tell(sys.exc_info()[1])


def _ends_amid_a_line(path: Path) -> bool:
    if not path.is_file() or not path.stat().st_size:
        return False
    with path.open("rb") as file:
        file.seek(-1, 2)
        return file.read(1) != b"\n"
