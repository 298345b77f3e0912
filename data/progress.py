"""Progress of reading a log: rows/s and the time that is left."""

from __future__ import annotations

import sys

from tqdm import tqdm


class RowProgress:
    """A bar over the bytes of a log, which are known beforehand, that tells rows as well.

    In a log file, where a bar cannot be redrawn, it prints a line every 10 seconds.

    Args:
        what: is done.
        total_bytes: of all files.
    """

    def __init__(self, what: str, total_bytes: int) -> None:
        terminal = sys.stderr.isatty()
        self._rows = 0
        self._bar = tqdm(
            total=total_bytes,
            desc=what,
            unit="B",
            unit_scale=True,
            mininterval=0.5 if terminal else 10.0,
            dynamic_ncols=terminal,
            ncols=None if terminal else 100,
            bar_format="{desc}: {percentage:3.0f}% |{bar}| {elapsed}<{remaining}{postfix}",
        )

    def __enter__(self) -> RowProgress:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def advance_bytes(self, count: int) -> None:
        """So many more bytes are done."""
        self._bar.update(count)

    def advance_to(self, position: int, rows: int = 0) -> None:
        """So many bytes are done by now, and so many more rows."""
        self._rows += rows
        if self._rows:
            elapsed = max(self._bar.format_dict["elapsed"], 1e-9)
            shown = f"{self._rows:,} rows, {self._rows / elapsed:,.0f} rows/s"
            self._bar.set_postfix_str(shown, refresh=False)
        self._bar.update(position - self._bar.n)
