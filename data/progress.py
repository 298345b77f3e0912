"""Progress bars of the commands: rows/s and the time left."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from typing import Any

from tqdm.auto import tqdm


def pace() -> dict[str, Any]:
    """Width and pace of a bar: redrawn twice a second in a terminal and in a notebook.

    In a log file, where a bar cannot be redrawn, it prints a line every 10 seconds.
    """
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if "IPKernelApp" in getattr(shell, "config", {}):
        return {"mininterval": 0.5}
    if sys.stderr.isatty():
        return {"mininterval": 0.5, "dynamic_ncols": True}
    return {"mininterval": 10.0, "ncols": 100}


class RowProgress(AbstractContextManager):
    """A bar over the bytes or rows of a log; it also shows rows and rows/s."""

    def __init__(self, what: str, total: int) -> None:
        self._rows = 0
        form = "{desc}: {percentage:3.0f}% |{bar}| {elapsed}<{remaining}{postfix}"
        self._bar = tqdm(total=total, desc=what, unit="B", bar_format=form, **pace())

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def advance_to(self, position: int, rows: int = 0) -> None:
        """Advance to a position of the total, and by `rows` rows."""
        self._rows += rows
        if self._rows:
            elapsed = max(self._bar.format_dict["elapsed"], 1e-9)
            shown = f"{self._rows:,} rows, {self._rows / elapsed:,.0f} rows/s"
            self._bar.set_postfix_str(shown, refresh=False)
        self._bar.update(position - self._bar.n)
