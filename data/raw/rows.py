"""Rows of a file before typing, and bad rows."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path

import numpy as np
import polars as pl

from stampede.data.errors import DataError
from stampede.data.options import OnBadRow

# Count of cells that became null because of their text, by column and text.
Marks = Counter[tuple[str, str]]

# Characters of a bad row that are written to the list of bad rows.
_LONGEST = 2000


@dataclass(frozen=True)
class BadRow:
    """A row that cannot be used: what was found there, and what to write instead."""

    file: str
    line: int  # number of the line, or of the row of a Parquet file, from 1
    column: str  # empty if the whole row is bad
    found: str
    remedy: str
    text: str  # the whole row


class BadRows:
    """Raises at a bad row, or counts and lists bad rows.

    Args:
        policy: `error` raises at the first bad row; `skip` leaves bad rows out.
        aside: JSON lines file to list them in; None: only count them.
        remedy: an alternative to writing a good value, for the message.
    """

    def __init__(self, policy: OnBadRow, aside: Path | None = None, remedy: str = "") -> None:
        self._policy = policy
        self._aside = aside
        self._remedy = remedy
        self.count = 0
        self.marks: Marks = Counter()
        self.values: Counter[str] = Counter()
        self.whole: Counter[str] = Counter()
        self.rounded: Counter[str] = Counter()

    def report(self, rows: Sequence[BadRow]) -> None:
        """Count and list bad rows; the caller leaves them out.

        Raises:
            DataError: the policy is `error`; names the first bad row.
        """
        if not rows:
            return
        rows = sorted(rows, key=lambda row: row.line)
        if self._policy == "error":
            bad, remedy = rows[0], f" (or {self._remedy})" if self._remedy else ""
            where = f"{bad.file}: line {bad.line}" + f", column {bad.column}" * bool(bad.column)
            found = bad.found if len(bad.found) <= 200 else bad.found[:200] + "..."
            raise DataError(f"{where}: found {found}; {bad.remedy}{remedy}")
        self.count += len(rows)
        if self._aside is not None:
            with self._aside.open("a", encoding="utf-8") as file:
                for row in rows:
                    entry = {**asdict(row), "text": row.text[:_LONGEST]}
                    file.write(json.dumps(entry, ensure_ascii=False) + "\n")

    def add(self, other: BadRows) -> None:
        """Count and list what another process has found in the next file."""
        self.count += other.count
        for name in ("marks", "values", "whole", "rounded"):
            getattr(self, name).update(getattr(other, name))
        if other._aside is not None and other._aside.exists() and self._aside is not None:
            with self._aside.open("ab") as file:
                file.write(other._aside.read_bytes())

    def marks_by_column(self) -> dict[str, dict[str, int]]:
        """Count of missing cells by column and text, the most frequent first."""
        columns: dict[str, dict[str, int]] = {}
        for (column, mark), cells in self.marks.most_common():
            columns.setdefault(column, {})[mark] = cells
        return columns


@dataclass(frozen=True)
class RawRows:
    """Some rows of a file."""

    frame: pl.DataFrame  # the used columns
    file: str
    lines: np.ndarray  # `[n]` number of each row's line, or row of a Parquet file, from 1
    numbers: np.ndarray  # `[n]` number of each row within the file, from 0, bad rows counted
    text: bytes | None  # the `n` records themselves; None for Parquet
    position: int  # bytes of the file read so far
    bad: Sequence[BadRow] = ()  # other rows
    marks: Marks = field(default_factory=Counter)  # cells that are null because of their text
    # Bad values that became null, by column of the file.
    values: Counter[str] = field(default_factory=Counter)
    # Ids such as `45.0` that were read as whole numbers, by column of the file.
    whole: Counter[str] = field(default_factory=Counter)
    # Whole numbers whose last digits float32 does not hold, by column of the file.
    rounded: Counter[str] = field(default_factory=Counter)
    starts: np.ndarray | None = None  # `[n + 1]` where records begin in text; None: each is a line

    def row_texts(self, indices: Sequence[int]) -> list[str]:
        """Whole rows as text, for messages."""
        if self.text is None:
            return [str(self.frame.row(index, named=True)) for index in indices]
        every = pieces_of(self.text, self.starts)
        return [every[index].decode("utf-8", "replace").rstrip("\r\n") for index in indices]


def pieces_of(text: bytes, starts: np.ndarray | None) -> list[bytes]:
    """Records of a text, which begin at `starts`; None: its lines."""
    if starts is None:
        return [line + b"\n" for line in text.split(b"\n")[:-1]]
    return [text[a:b] for a, b in pairwise(starts.tolist())]
