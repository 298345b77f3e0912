"""Sweeps that are killed or interrupted, and trials that fail, in processes of their own."""

import multiprocessing
import os
import signal
import sys
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from stampede.engine.errors import RunFolderError
from stampede.engine.sweep.__main__ import main
from stampede.engine.sweep.run import run_sweep, start_trial
from stampede.engine.sweep.spec import load_sweep
from support.forked import START_METHOD
from support.jobs import assert_same_lines
from support.sweeping import Started, rows_of, sweep, write_sweep
from support.waiting import HANG, wait_for

pytestmark = pytest.mark.slow

GRID = """
grid:
  rate:
    low: [optim.dense.lr=1e-4]
    too high: [optim.dense.lr=1e38, optim.dense.schedule.warmup=0]
  train.batch_size: [256]
seeds: [1, 2]
keep_checkpoints: false
"""


@contextmanager
def swept(*arguments):
    """The command in a process of its own, killed at the end."""
    process = multiprocessing.get_context(START_METHOD).Process(
        target=_sweep_here, args=([str(argument) for argument in arguments],)
    )
    process.start()
    try:
        yield process
    finally:
        process.kill()
        process.join()


def _sweep_here(arguments):
    # A shell starts background jobs, such as these tests, with SIGINT ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(main(arguments))


def test_a_killed_grid_with_failing_trials_goes_on_where_it_was(tmp_path):
    with pytest.raises(SystemExit):
        sweep(tmp_path, GRID, Started(die_at=2))
    assert not (tmp_path / "out/results.csv").exists()
    second = Started()
    sweep(tmp_path, GRID, second)
    # The first was done before the kill.
    assert second.names == ["low-256-seed2", "too-high-256-seed1", "too-high-256-seed2"]
    # Trials that failed keep theirs.
    assert not list((tmp_path / "out/trials").glob("low-*/checkpoints"))
    low, high = rows_of(tmp_path)
    assert (low["seeds"], low["failed"], low["selected_on"]) == ("2", "0", "validation")
    assert (high["seeds"], high["failed"], high["auc_mean"]) == ("0", "2", "")


def test_a_trial_ends_with_its_sweep_and_is_continued(tmp_path):
    text = "grid: {train.epochs: [25]}"
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
    sweep(tmp_path / "whole", text, Started())
    path, out = write_sweep(tmp_path / "killed", text), tmp_path / "killed/out"
    run = out / "trials/25-seed1"
    with swept(path, "--out", out) as process:
        # Only complete checkpoints have this name.
        assert wait_for(lambda: not process.is_alive() or list(run.glob("checkpoints/epoch_*")))
        trial = trial_of(run)
        assert trial != process.pid and not is_gone(trial)
        process.kill()
        process.join()
    assert wait_for(lambda: is_gone(trial))
    assert not (run / "summary.json").exists()
    run_sweep(load_sweep(path, folder=out), Started())
    assert "continuing after step" in (out / "trials/25-seed1.log").read_text()
    assert_same_lines(run, tmp_path / "whole/out/trials/25-seed1")


def test_ctrl_c_ends_a_sweep_and_its_trial(tmp_path):
    path, out = write_sweep(tmp_path, "grid: {train.epochs: [100000]}"), tmp_path / "out"
    run = out / "trials/100000-seed1"
    with swept(path, "--out", out) as process:
        assert wait_for(lambda: not process.is_alive() or (run / "metrics.jsonl").exists())
        with pytest.raises(RunFolderError, match="in use by another sweep"):
            run_sweep(load_sweep(path, folder=out), Started())
        trial = trial_of(run)
        os.kill(process.pid, signal.SIGINT)
        process.join(HANG)
    assert process.exitcode == 130
    assert wait_for(lambda: is_gone(trial))


def trial_of(run):
    """Process id of a trial, from the lock file that it deletes at its end."""
    return int(run.with_name(f".{run.name}.lock").read_text())


def is_gone(process):
    """Whether a process has ended, perhaps as a zombie, and its threads have closed its files."""
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
        return state == "Z" and len(os.listdir(f"/proc/{process}/task")) == 1
    except FileNotFoundError:
        return True


def test_trials_on_two_processes_that_fail_are_recorded_with_their_sentence(tmp_path):
    text = "grid: {optim.dense.lr: [1e38, 1e-4]}\noverrides: [optim.dense.schedule.warmup=0]"
    sweep(tmp_path, text, partial(start_trial, 2))
    assert sorted(row["failed"] for row in rows_of(tmp_path)) == ["0", "1"]
    table = (tmp_path / "out/results.md").read_text()
    assert "-seed1`: the loss is nan" in table
    assert "ChildFailedError" not in table
    # With a single process they would be table_wise.
    for log in (tmp_path / "out/trials").glob("*.log"):
        assert "tables row_wise" in log.read_text()
