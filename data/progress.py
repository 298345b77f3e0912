"""Progress of long work: a bar in a terminal or a notebook, lines in a file, nothing if quiet."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import tqdm
import tqdm.auto

# Whether progress is shown in this process; see `quiet`.
_shown = True


@contextmanager
def quiet() -> Iterator[None]:
    """Show no progress meanwhile."""
    global _shown
    before, _shown = _shown, False
    try:
        yield
    finally:
        _shown = before


def bar(seconds: float = 0.0, **settings: Any) -> tqdm.tqdm:
    """A bar of tqdm, with its settings; see `Lines` where it could not be redrawn.

    Args:
        seconds: at least so many between lines, so that short work prints none.
    """
    if not _shown:
        return tqdm.tqdm(**settings | {"disable": True})
    if _is_notebook():
        return tqdm.auto.tqdm(mininterval=0.5, **settings)
    if sys.stderr.isatty():
        return tqdm.tqdm(mininterval=0.5, dynamic_ncols=True, **settings)
    return Lines(seconds, **settings)


def _is_notebook() -> bool:
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return "IPKernelApp" in getattr(shell, "config", {})


class Lines(tqdm.tqdm):
    """Prints a line after every tenth, for logs in files; without a total, it prints nothing."""

    def __init__(self, seconds: float, **settings: Any) -> None:
        self._seconds, self._since = seconds, time.monotonic()
        # tqdm counts the initial units as done.
        self._tenths = self._tenths_of(settings.get("initial", 0), settings.get("total"))
        super().__init__(mininterval=0, miniters=1, **settings)

    @staticmethod
    def status_printer(file: Any) -> Any:
        """What would redraw a bar: nothing."""
        return lambda _: None

    def clear(self, *_: Any, **__: Any) -> None:
        """Nothing stands to be cleared before another line."""

    def display(self, *_: Any, **__: Any) -> None:
        """Print a line if the next tenth is done."""
        tenths, now = self._tenths_of(self.n, self.total), time.monotonic()
        if tenths <= self._tenths or now - self._since < self._seconds:
            return
        self._tenths, self._since = tenths, now
        print(self._line(), file=self.fp, flush=True)

    def close(self) -> None:
        """End it; nothing is left to print."""
        if not self.disable:
            self.disable = True
            self._decr_instances(self)

    @staticmethod
    def _tenths_of(done: float, total: float | None) -> int:
        return int(10 * done / total) if total else 0

    def _line(self) -> str:
        known = self.format_dict
        rate = (self.n - self.initial) / max(known["elapsed"], 1e-9)
        said = [f"{self.desc.removesuffix(': ')}: {100 * self.n / self.total:.0f}%"]
        if self.unit_scale and self.unit != "B":
            said.append(f"{self.n:,.0f} of {self.total:,.0f}{self.unit}, {rate:,.0f}{self.unit}/s")
        if 0 < self.n < self.total and rate > 0:
            said.append(f"{self.format_interval((self.total - self.n) / rate)} left")
        return ", ".join([*said, *filter(None, [self.postfix])])


class RowProgress(AbstractContextManager):
    """A bar over the bytes or rows of a log; it also shows rows and rows/s."""

    def __init__(self, what: str, total: int) -> None:
        self._rows, self._start = 0, time.monotonic()
        form = "{desc}: {percentage:3.0f}% |{bar}| {elapsed}<{remaining}{postfix}"
        # In a notebook, only the bar of the training stays.
        leave = not _is_notebook()
        self._bar = bar(10.0, total=total, desc=what, unit="B", bar_format=form, leave=leave)

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def advance_to(self, position: int, rows: int = 0) -> None:
        """Advance to a position of the total, and by `rows` rows."""
        self._rows += rows
        if self._rows:
            elapsed = max(time.monotonic() - self._start, 1e-9)
            shown = f"{self._rows:,} rows, {self._rows / elapsed:,.0f} rows/s"
            self._bar.set_postfix_str(shown, refresh=False)
        self._bar.update(position - self._bar.n)
