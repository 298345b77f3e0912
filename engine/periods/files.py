"""The new files of a log: their order, and whether they are complete."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from stampede import stores
from stampede.data.errors import DataError, NoSuchFileError
from stampede.data.raw.files import expand, naturally
from stampede.engine.config.data import RawSection
from stampede.engine.periods.ledger import Ledger, Period
from stampede.engine.reading import first_time

# A file is complete once its size has not changed for this long.
_AT_REST_SECONDS = 5.0

# Time of a file whose time cannot be read yet: later than all others.
LATEST = 1 << 62


class LogFiles:
    """The files of a log; only rank 0 looks at them."""

    def __init__(self, section: RawSection, ledger: Ledger) -> None:
        self._section, self._ledger = section, ledger
        # Sizes of new files, and since when they have had them.
        self._sizes: dict[Path, tuple[int, float]] = {}
        # Times of new files, by path and size.
        self._times: dict[tuple[Path, int], int] = {}

    def new(self, at_rest: bool) -> list[Period]:
        """Files that are not in the ledger, in order.

        Args:
            at_rest: only files before the first one that is still being written.

        Raises:
            DataError: a file has changed since it was trained on, or there are none at all.
        """
        entries = self._ledger.entries()
        number = 1 + sum(one.number > 0 for one in entries)
        taken = {path: one for one in entries for path in (one.file, one.leads_to)}
        try:
            files = [_absolute(file) for file in expand(self._section.path)]
        except NoSuchFileError:
            if at_rest:
                return []
            raise
        new = []
        for file in files:
            leads_to = str(file) if stores.is_url(file) else os.path.realpath(file)
            about = {"file": str(file), "leads_to": leads_to, "bytes": stores.length(file)}
            before = taken.get(about["file"]) or taken.get(leads_to)
            if before is None:
                new.append(Period(number=number, time=self.time(file, about["bytes"]), **about))
            elif before.number and before.bytes != about["bytes"]:
                raise DataError(
                    f"{file}: was trained on with {before.bytes:,} bytes and has "
                    f"{about['bytes']:,} now; put new rows into a new file"
                )
        new.sort(key=place)
        if at_rest:
            resting = [self.is_at_rest(one) for one in new]
            new = new[: [*resting, False].index(False)]
        return new

    def is_at_rest(self, period: Period) -> bool:
        """Whether a file is complete: its size has not changed for a while, or it is gone."""
        file = stores.at(period.file)
        size = stores.length(file) if stores.exists(file) else 0
        before, since = self._sizes.get(file, (-1, 0.0))
        if before != size:
            self._sizes[file] = (size, time.monotonic())
            return False
        return time.monotonic() - since >= _AT_REST_SECONDS

    def time(self, file: Path, size: int) -> int | None:
        """The smallest time of a file of that size; None if files are not ordered by time."""
        if self._section.order_by != "time":
            return None
        if (file, size) not in self._times:
            found = None
            with suppress(DataError):
                found = first_time(self._section, file)
            self._times[file, size] = LATEST if found is None else found
        return self._times[file, size]


def place(period: Period) -> tuple[int, list[Any]]:
    """The sort key of periods."""
    return period.time or 0, naturally(stores.at(period.file))


def _absolute(file: Path) -> Path:
    """A file by a path that does not depend on the working folder."""
    return file if stores.is_url(file) else Path(os.path.abspath(file))
