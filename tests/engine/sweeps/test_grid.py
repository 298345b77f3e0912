"""Grids: failing trials, kills, what they leave."""

import csv
import json
import signal
import subprocess
import sys

import pytest

from stampede.engine.errors import RunFolderError, TrainingStoppedError
from stampede.engine.sweeps.process import start_on
from stampede.engine.sweeps.run import run_sweep
from stampede.engine.sweeps.sweep import load_sweep
from support.paths import ROOT
from support.sweeping import Started, sweep, write_sweep
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


def rows_of(found):
    with (found.folder / "results.csv").open() as file:
        return list(csv.DictReader(file))


def test_a_killed_grid_with_failing_trials_goes_on_where_it_was(tmp_path, capsys):
    with pytest.raises(SystemExit):
        sweep(tmp_path, GRID, Started(die_at=2))
    assert not (tmp_path / "out/results.csv").exists()
    second = Started()
    found = sweep(tmp_path, GRID, second)
    # The first was done before the kill.
    assert second.names == ["low-256-seed2", "too-high-256-seed1", "too-high-256-seed2"]

    low, high = rows_of(found)
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
    assert rows_of(load_sweep(tmp_path / "tiny.yaml", folder=tmp_path / "out"))[0]["failed"] == "1"


@pytest.mark.parametrize("how, ends_with", [(signal.SIGKILL, -9), (signal.SIGINT, 130)])
def test_a_trial_ends_with_its_sweep(tmp_path, how, ends_with):
    path = write_sweep(tmp_path, "grid: {train.epochs: [100000]}")
    out = tmp_path / "out"
    command = [sys.executable, "-m", "stampede.engine.sweep", str(path), "--out", str(out)]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL)
    lock = out / "trials/.100000-seed1.lock"
    try:
        assert wait_for(
            lambda: lock.exists() and (out / "trials/100000-seed1/metrics.jsonl").exists()
        )
        with pytest.raises(RunFolderError, match="in use by another sweep"):
            run_sweep(load_sweep(path, folder=out), start_on(1))
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
