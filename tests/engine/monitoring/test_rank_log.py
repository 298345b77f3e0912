"""The log of a rank: whole lines, bounded, given up where it cannot be written."""

import json
import subprocess
import sys

import pytest

from stampede.engine.monitoring import rank_log
from stampede.engine.monitoring.rank_log import RankLog, log_file
from support.paths import ROOT


def lines(folder, rank=0):
    return [json.loads(line) for line in log_file(folder, rank).read_text().splitlines()]


def test_lines_have_time_rank_and_event(tmp_path):
    log = RankLog(tmp_path / "run", 3)
    log.write("timing", step=7, seconds=0.5, share=float("nan"))
    log.close()
    log.write("too late")
    (line,) = lines(tmp_path / "run", 3)
    assert line.pop("time").endswith("+00:00")
    assert line == {"rank": 3, "event": "timing", "step": 7, "seconds": 0.5, "share": None}


def test_a_log_goes_on_after_half_a_line(tmp_path):
    path = log_file(tmp_path, 0)
    path.parent.mkdir()
    path.write_text('{"event": "first"}\n{"eve')
    log = RankLog(tmp_path, 0)
    log.write("second")
    log.close()
    whole = path.read_text().splitlines()
    assert len(whole) == 3 and json.loads(whole[2])["event"] == "second"


def test_a_log_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(rank_log, "_MOST_BYTES", 2000)
    log = RankLog(tmp_path, 0)
    for step in range(100):
        log.write("timing", step=step)
    log.close()
    files = sorted(path.name for path in (tmp_path / "logs").iterdir())
    assert files == ["rank_0.jsonl", "rank_0.jsonl.1"]
    assert all(path.stat().st_size <= 2000 for path in (tmp_path / "logs").iterdir())
    assert lines(tmp_path)[-1]["step"] == 99


KILLED = """
import os, sys
from pathlib import Path
from stampede.engine.monitoring.rank_log import RankLog

log = RankLog(Path(sys.argv[1]), 0)
for step in range(3):
    log.write("timing", step=step)
os.kill(os.getpid(), 9)
"""


def test_a_kill_loses_no_line(tmp_path):
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], cwd=ROOT, timeout=100)
    assert done.returncode == -9
    assert [line["step"] for line in lines(tmp_path)] == [0, 1, 2]


def test_a_full_disk_ends_the_log_with_one_sentence(tmp_path, capsys):
    path = log_file(tmp_path, 1)
    path.parent.mkdir()
    path.symlink_to("/dev/full")
    log = RankLog(tmp_path, 1)
    for step in range(3):
        log.write("timing", step=step)
    log.close()
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert said.startswith(f"rank 1: {path}: the log cannot be written (No space left on device); ")


@pytest.mark.parametrize("write", [True, False])
def test_a_folder_that_cannot_be_made(tmp_path, capsys, write):
    (tmp_path / "logs").write_text("a file")
    log = RankLog(tmp_path, 0)
    if write:
        log.write("timing")
    log.close()
    assert capsys.readouterr().err.count("the log cannot be written (") == 1
