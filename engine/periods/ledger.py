"""Which files of a log were taken, in order: `periods.json`."""

from __future__ import annotations

import sys

from pydantic import Field

from stampede.engine.errors import RunFolderError
from stampede.engine.results.run_folder import PERIODS, RunFolder
from stampede.files import MOST_MANIFEST, read_file, sync, write_file
from stampede.settings import Section, reading


class Period(Section):
    """A file of the log.

    Attributes:
        number: from 1; 0 for a file that was left out.
        file: its absolute path.
        leads_to: the path with links resolved; it identifies the file as well.
        bytes: its size.
        time: its smallest time in seconds since 1970, if files are ordered by time.
        replay: number of earlier files that a new model is also trained on; 0: none, the model of
            the period before goes on.
        reason: why it was left out; otherwise empty.
    """

    number: int = Field(ge=0)
    file: str
    leads_to: str = ""
    bytes: int = Field(ge=0)
    time: int | None = None
    replay: int = Field(0, ge=0)
    reason: str = ""


class _Content(Section):
    periods: list[Period] = Field(default_factory=list)


class Ledger:
    """The files that were taken; only rank 0 reads and writes it."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder, self._file = folder, folder.path / PERIODS

    def entries(self) -> list[Period]:
        """All files, also those that were left out.

        Raises:
            RunFolderError: the ledger is damaged.
        """
        if not self._file.exists():
            return []
        remedy = "it lists the files already trained on; restore it, or write another run.name"
        with reading(self._file, RunFolderError, remedy):
            return _Content.model_validate_json(read_file(self._file, MOST_MANIFEST)).periods

    def periods(self) -> list[Period]:
        """The files that were not left out; the last one may still be in training."""
        return [one for one in self.entries() if one.number]

    def replayed(self, period: Period) -> list[Period]:
        """The earlier files that a period trains on again."""
        before = [one for one in self.periods() if one.number < period.number]
        return before[len(before) - period.replay :]

    def add(self, period: Period) -> None:
        """Note a new file."""
        self._write([*self.entries(), period])

    def replace(self, period: Period) -> None:
        """Note what has changed of a file."""
        self._write([period if one.file == period.file else one for one in self.entries()])

    def leave_out(self, period: Period, reason: str) -> None:
        """Note a file as left out, log and print it."""
        others = [one for one in self.entries() if one.file != period.file]
        self._write([*others, period.model_copy(update={"number": 0, "reason": reason})])
        step = max([0, *(line["step"] for line in self._folder.lines())])
        told = {"kind": "left_out", "step": step, "file": period.file, "reason": reason}
        self._folder.log(told)
        print(f"left out: {reason}", file=sys.stderr, flush=True)

    def _write(self, periods: list[Period]) -> None:
        with self._folder.writing():
            write_file(self._file, _Content(periods=periods).model_dump_json(indent=1) + "\n")
            # After a power failure the ledger must agree with the lines and checkpoints.
            sync(self._file)
            sync(self._file.parent)
