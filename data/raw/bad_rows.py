"""Rows that cannot be used: an error, or left out, counted and written aside; missing values."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from stampede.data.errors import DataError
from stampede.data.raw.missing_marks import Marks

OnBadRow = Literal["error", "skip"]

_LONGEST = 2000


@dataclass(frozen=True)
class BadRow:
    """A row that cannot be used.

    Attributes:
        file: where it is.
        line: its line, or row of a Parquet file, from 1.
        column: its column; empty where the row as a whole is wrong.
        found: the text found there.
        remedy: what to write instead.
        text: the whole row.
    """

    file: str
    line: int
    column: str
    found: str
    remedy: str
    text: str

    def sentence(self) -> str:
        """For a person."""
        where = f"{self.file}: line {self.line}" + f", column {self.column}" * bool(self.column)
        found = self.found if len(self.found) <= 200 else self.found[:200] + "..."
        return f"{where}: found {found}; {self.remedy}"


class BadRows:
    """What happens to bad rows.

    Args:
        policy: `error` raises at the first; `skip` leaves them out.
        aside: JSON lines file that gets them; None where they are only counted.
        option: what a user writes to leave them out.

    Attributes:
        count: rows left out so far.
        marks: cells so far that are missing because of their text (see `missing_marks`).
        values: bad values so far that were taken for missing ones, by column.
    """

    def __init__(self, policy: OnBadRow, aside: Path | None = None, option: str = "") -> None:
        self._policy = policy
        self._aside = aside
        self._option = option
        self.count = 0
        self.marks: Marks = Counter()
        self.values: Counter[str] = Counter()

    def report(self, rows: Sequence[BadRow]) -> None:
        """Take note of some rows, which the caller leaves out.

        Raises:
            DataError: the policy is `error`; names the first.
        """
        if not rows:
            return
        rows = sorted(rows, key=lambda row: row.line)
        if self._policy == "error":
            remedy = f" (or {self._option} to leave such rows out)" if self._option else ""
            raise DataError(rows[0].sentence() + remedy)
        self.count += len(rows)
        if self._aside is not None:
            with self._aside.open("a", encoding="utf-8") as file:
                for row in rows:
                    entry = {**asdict(row), "text": row.text[:_LONGEST]}
                    file.write(json.dumps(entry, ensure_ascii=False) + "\n")
