"""Trials that were killed, and trials of several processes that fail."""

import csv
import signal
import subprocess
import sys
import time

import pytest

from stampede.engine.sweeps.process import start_on
from stampede.engine.sweeps.run import run_sweep
from stampede.engine.sweeps.sweep import load_sweep
from support.jobs import without_times
from support.paths import ROOT
from support.sweeping import Started, sweep, write_sweep
from support.waiting import HANG

pytestmark = pytest.mark.slow

FAILING = """
grid:
  rate:
    high: [optim.dense.lr=1e38]
    higher: [optim.dense.lr=3e38]
    low: [optim.dense.lr=1e-4]
overrides: [optim.dense.schedule.warmup=0]
"""


def rows_of(folder):
    with (folder / "results.csv").open() as file:
        return list(csv.DictReader(file))


def test_a_trial_on_two_processes_that_fails_is_recorded_with_its_sentence(tmp_path):
    text = FAILING.replace("    higher: [optim.dense.lr=3e38]\n", "")
    sweep(tmp_path, text, start_on(2))
    high, low = rows_of(tmp_path / "out")
    assert (high["failed"], low["failed"]) == ("1", "0")
    table = (tmp_path / "out/results.md").read_text()
    assert "`high-seed1`: the loss is nan" in table
    assert "ChildFailedError" not in table
    (tmp_path / "one").mkdir()
    sweep(tmp_path / "one", text, Started())
    alone = rows_of(tmp_path / "one/out")[1]
    assert float(low["auc_mean"]) == pytest.approx(float(alone["auc_mean"]), abs=1e-4)


def test_a_kill_in_the_middle_of_retry_failed_loses_no_failure(tmp_path):
    sweep(tmp_path, FAILING, Started())
    killed = Started(die_at=2)
    with pytest.raises(SystemExit):
        sweep(tmp_path, FAILING, killed, retry_failed=True)
    assert killed.names == ["high-seed1", "higher-seed1"]
    # The one that was killed has not ended, so that it is run; the other's failure is known.
    after = Started()
    sweep(tmp_path, FAILING, after)
    assert after.names == ["higher-seed1"]
    assert [row["failed"] for row in rows_of(tmp_path / "out")] == ["1", "1", "0"]
    again = Started()
    sweep(tmp_path, FAILING, again, retry_failed=True)
    assert again.names == ["high-seed1", "higher-seed1"]


def test_a_trial_killed_in_its_middle_is_continued_not_begun_again(tmp_path):
    text = "grid: {train.epochs: [30]}"
    (tmp_path / "whole").mkdir()
    sweep(tmp_path / "whole", text, Started())
    (tmp_path / "killed").mkdir()
    path, out = write_sweep(tmp_path / "killed", text), tmp_path / "killed/out"
    run = out / "trials/30-seed1"
    process = subprocess.Popen(
        [sys.executable, "-m", "stampede.engine.sweep", str(path), "--out", str(out)],
        cwd=ROOT,
        stderr=subprocess.DEVNULL,
    )
    ends = time.monotonic() + HANG
    # The name that a whole one has.
    while not list(run.glob("checkpoints/epoch_*")):
        assert time.monotonic() < ends and process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (run / "summary.json").exists()
    run_sweep(load_sweep(path, folder=out), start_on(1))
    assert "continuing after step" in (out / "trials/30-seed1.log").read_text()
    assert without_times(run) == without_times(tmp_path / "whole/out/trials/30-seed1")
