"""Progress in a terminal, in a notebook, in a file, and none."""

import io
import sys
from types import SimpleNamespace

from tqdm import tqdm

from stampede.data.progress import RowProgress
from stampede.engine.console import progress_bar


def standard_error(monkeypatch):
    """One that is no terminal."""
    file = io.StringIO()
    monkeypatch.setattr(sys, "stderr", file)
    return file


def test_a_bar_is_redrawn_in_a_terminal_and_a_notebook(monkeypatch):
    file = standard_error(monkeypatch)
    monkeypatch.setattr(file, "isatty", lambda: True, raising=False)
    with progress_bar(10, 0, True) as bar, RowProgress("scoring", 10) as rows:
        assert bar.mininterval == rows._bar.mininterval == 0.5
        assert bar.leave and rows._bar.leave
        bar.update(5)
    assert "\r" in file.getvalue()
    # The standard error of a notebook is no terminal. One bar stays there.
    standard_error(monkeypatch)
    shell = SimpleNamespace(config={"IPKernelApp": {}})
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    with progress_bar(10, 0, True) as bar, RowProgress("scoring", 10) as rows:
        assert bar.mininterval == rows._bar.mininterval == 0.5
        assert bar.leave and not rows._bar.leave


def test_a_file_gets_a_line_after_every_tenth(monkeypatch, capsys):
    file = standard_error(monkeypatch)
    with progress_bar(2000, 100, True) as bar:
        for step in range(190):
            bar.set_postfix({"loss": f"{step}", "epoch": 1}, refresh=False)
            bar.update(10)
            if step == 100:
                tqdm.write("epoch 1")
    told = file.getvalue()
    assert "\r" not in told and "\x1b" not in told
    lines = told.splitlines()
    assert [line.partition("%")[0] for line in lines] == [
        f"training: {tenth}0" for tenth in range(1, 11)
    ]
    assert lines[0].startswith("training: 10%, 200 of 2,000 samples, ")
    assert " samples/s, " in lines[4] and " left, loss=89, epoch=1" in lines[4]
    assert "left" not in lines[-1]
    assert capsys.readouterr().out == "epoch 1\n"
