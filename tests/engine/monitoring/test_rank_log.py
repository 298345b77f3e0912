"""The log of a rank: whole lines, given up where it cannot be written."""

import json
import subprocess
import sys

from stampede.engine.monitor import RankLog, log_file
from support.paths import ROOT


def lines(folder, rank=0):
    return [json.loads(line) for line in log_file(folder, rank).read_text().splitlines()]


def test_lines_have_time_rank_and_event(tmp_path):
    log = RankLog(tmp_path / "run", 3)
    log.write("timing", step=7, seconds=0.5, share=float("nan"))
    (line,) = lines(tmp_path / "run", 3)
    assert line.pop("time").endswith("+00:00")
    assert line == {"rank": 3, "event": "timing", "step": 7, "seconds": 0.5, "share": None}


KILLED = """
import os, sys
from pathlib import Path
from stampede.engine.monitor import RankLog

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
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert said.startswith(f"rank 1: {path}: the log cannot be written (No space left on device); ")


def test_a_folder_that_cannot_be_made(tmp_path, capsys):
    (tmp_path / "logs").write_text("a file")
    log = RankLog(tmp_path, 0)
    log.write("timing")
    log.write("timing")
    assert capsys.readouterr().err.count("the log cannot be written (") == 1
