"""Progress in a terminal, in a notebook, in a file, and none."""

import io
import sys
from types import SimpleNamespace

from tqdm import tqdm

from stampede.data.progress import Lines, RowProgress, quiet
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


def test_short_work_leaves_no_line_in_a_file(monkeypatch):
    file = standard_error(monkeypatch)
    with RowProgress("describing", 100) as rows:
        for position in range(0, 101, 10):
            rows.advance_to(position, 1000)
    assert file.getvalue() == ""
    now = [0.0]
    monkeypatch.setattr("stampede.data.progress.time", SimpleNamespace(monotonic=lambda: now[0]))
    with RowProgress("describing", 100) as rows:
        for position in range(0, 101, 10):
            now[0] += 6.0
            rows.advance_to(position, 1000)
    lines = file.getvalue().splitlines()
    assert [line.partition("%")[0] for line in lines] == [
        f"describing: {at}" for at in (10, 30, 50, 70, 90)
    ]
    assert lines[0].endswith("left, 2,000 rows, 167 rows/s")


def test_without_a_total_or_enabled_nothing_is_printed(monkeypatch):
    file = standard_error(monkeypatch)
    for total, enabled in ((None, True), (10, False)):
        with progress_bar(total, 0, enabled) as bar:
            for _ in range(10):
                bar.update()
    with quiet(), progress_bar(10, 0, True) as bar, RowProgress("scoring", 10) as rows:
        bar.update(10)
        rows.advance_to(10, 10)
        assert not isinstance(bar, Lines)
    assert file.getvalue() == ""
