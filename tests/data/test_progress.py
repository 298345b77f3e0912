"""Bars in terminals, notebooks and log files."""

import io
import sys
from types import SimpleNamespace

import pytest

from stampede.data.progress import RowProgress, pace
from stampede.engine.console import progress_bar


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def notebook(monkeypatch):
    shell = SimpleNamespace(config={"IPKernelApp": {}})
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))


def test_a_bar_is_redrawn_often_where_it_can_be(monkeypatch):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    assert pace() == {"mininterval": 10.0, "ncols": 100}
    monkeypatch.setattr(sys, "stderr", Terminal())
    assert pace() == {"mininterval": 0.5, "dynamic_ncols": True}


def test_a_notebook_is_no_log_file(monkeypatch, notebook):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with progress_bar(10, 0, True) as bar, RowProgress("scoring", 10) as rows:
        assert bar.mininterval == rows._bar.mininterval == 0.5
        assert bar.ncols is None
