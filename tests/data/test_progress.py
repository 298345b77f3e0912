"""Bars in terminals, notebooks and log files."""

import io
import sys
from types import SimpleNamespace

from stampede.data.progress import RowProgress, pace
from stampede.engine.console import progress_bar


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_bar_is_redrawn_often_except_in_a_log_file(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    assert pace() == {"mininterval": 0.5, "dynamic_ncols": True}
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    assert pace() == {"mininterval": 10.0, "ncols": 100}
    # The standard error of a notebook is no terminal either.
    shell = SimpleNamespace(config={"IPKernelApp": {}})
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    with progress_bar(10, 0, True) as bar, RowProgress("scoring", 10) as rows:
        assert bar.mininterval == rows._bar.mininterval == 0.5
        assert bar.ncols is None
