"""Sweeps that are killed or interrupted, and trials that fail, in processes of their own."""

import json
import signal
import subprocess
import sys
import time
from functools import partial

import pytest

from stampede.engine.errors import RunFolderError, TrainingStoppedError
from stampede.engine.sweep.run import run_sweep, start_trial
from stampede.engine.sweep.spec import load_sweep
from support.jobs import without_times
from support.paths import ROOT
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
overrides: [train.epochs=2]
keep_checkpoints: false
report: {metrics: [auc, train_seconds]}
"""


def test_a_killed_grid_with_failing_trials_goes_on_where_it_was(tmp_path, capsys):
    with pytest.raises(SystemExit):
        sweep(tmp_path, GRID, Started(die_at=2))
    assert not (tmp_path / "out/results.csv").exists()
    second = Started()
    sweep(tmp_path, GRID, second)
    # The first was done before the kill.
    assert second.names == ["low-256-seed2", "too-high-256-seed1", "too-high-256-seed2"]

    low, high = rows_of(tmp_path)
    each, seconds = [], []
    for seed in (1, 2):
        run = tmp_path / f"out/trials/low-256-seed{seed}"
        summary = json.loads((run / "summary.json").read_text())
        each.append(summary["best_auc"])
        seconds.append(summary["train_seconds"])
        assert (run / "config.yaml").exists() and (run / "curve.png").exists()
        assert not (run / "checkpoints").exists()
    assert float(low["auc_mean"]) == pytest.approx(sum(each) / 2)
    assert float(low["train_seconds_mean"]) == pytest.approx(sum(seconds) / 2)
    # Of two values the standard error is half of their distance.
    assert float(low["auc_stderr"]) == pytest.approx(abs(each[0] - each[1]) / 2)
    assert each[0] != each[1]
    assert (low["seeds"], low["failed"], low["selected_on"]) == ("2", "0", "validation")
    assert (high["seeds"], high["failed"], high["auc_mean"]) == ("0", "2", "")

    text = (tmp_path / "out/results.md").read_text()
    assert "`too-high-256-seed1`: the loss is nan" in text
    assert "best on the validation part" in text
    assert "published" not in text
    assert max(map(len, text.splitlines())) <= 100
    for name in ("auc.png", "seconds.png"):
        assert (tmp_path / "out" / name).read_bytes().startswith(b"\x89PNG")

    third = Started()
    sweep(tmp_path, GRID, third)
    assert third.names == []
    with pytest.raises(SystemExit):
        sweep(tmp_path, GRID, Started(die_at=1), retry_failed=True)
    # A seed more is one run more.
    with pytest.raises(SystemExit):
        sweep(tmp_path, GRID.replace("[1, 2]", "[1, 2, 3]"), Started(die_at=1))
    # Runs of another configuration are neither taken for this one's nor deleted.
    with pytest.raises(RunFolderError, match="another configuration"):
        sweep(tmp_path, GRID.replace("lr=1e-4", "lr=2e-4"), Started())


def test_a_sweep_all_of_whose_trials_fail_says_why(tmp_path):
    text = "grid: {optim.dense.lr: [1e38]}\noverrides: [optim.dense.schedule.warmup=0]"
    with pytest.raises(TrainingStoppedError, match=r"all 1 trials failed.*loss is nan"):
        sweep(tmp_path, text, Started())
    assert rows_of(tmp_path)[0]["failed"] == "1"


@pytest.mark.parametrize("how, ends_with", [(signal.SIGKILL, -9), (signal.SIGINT, 130)])
def test_a_trial_ends_with_its_sweep(tmp_path, how, ends_with):
    path = write_sweep(tmp_path, "grid: {train.epochs: [100000]}")
    out = tmp_path / "out"
    command = [sys.executable, "-m", "stampede.engine.sweep", str(path), "--out", str(out)]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        stderr=subprocess.DEVNULL,
        # A shell starts background jobs, such as these tests, with SIGINT ignored.
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )
    lock = out / "trials/.100000-seed1.lock"
    try:
        assert wait_for(
            lambda: lock.exists() and (out / "trials/100000-seed1/metrics.jsonl").exists()
        )
        with pytest.raises(RunFolderError, match="in use by another sweep"):
            run_sweep(load_sweep(path, folder=out), partial(start_trial, 1))
        # The trial deletes it as it ends.
        trial = int(lock.read_text())
    finally:
        process.send_signal(how)
        status = process.wait(HANG)
    assert status == ends_with
    assert trial != process.pid
    assert wait_for(lambda: _is_gone(trial))


def _is_gone(process):
    try:
        with open(f"/proc/{process}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


pytestmark = pytest.mark.slow

FAILING = """
grid:
  rate:
    high: [optim.dense.lr=1e38]
    higher: [optim.dense.lr=3e38]
    low: [optim.dense.lr=1e-4]
overrides: [optim.dense.schedule.warmup=0]
"""


def test_a_trial_on_two_processes_that_fails_is_recorded_with_its_sentence(tmp_path):
    text = FAILING.replace("    higher: [optim.dense.lr=3e38]\n", "")
    sweep(tmp_path, text, partial(start_trial, 2))
    high, low = rows_of(tmp_path)
    assert (high["failed"], low["failed"]) == ("1", "0")
    table = (tmp_path / "out/results.md").read_text()
    assert "`high-seed1`: the loss is nan" in table
    assert "ChildFailedError" not in table
    (tmp_path / "one").mkdir()
    sweep(tmp_path / "one", text, Started())
    alone = rows_of(tmp_path / "one")[1]
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
    assert [row["failed"] for row in rows_of(tmp_path)] == ["1", "1", "0"]
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
    run_sweep(load_sweep(path, folder=out), partial(start_trial, 1))
    assert "continuing after step" in (out / "trials/30-seed1.log").read_text()
    assert without_times(run) == without_times(tmp_path / "whole/out/trials/30-seed1")
