"""Whole runs whose rows take their steps later end as those that sweep all rows in every step."""

import json

import pytest
import torch

from stampede.engine.tables import read_field
from stampede.optim import CowClipTables
from support.jobs import run_small, without_times
from support.updated_tables import computed

FIELDS = ("C1", "C3", "C10")


def run_in(way, folder, *parts):
    """One run, or one that is interrupted and continued; its metrics and tables."""
    folder.mkdir()
    with computed(way, window=4):
        for overrides in parts:
            run_small(folder, ["evaluate.every=3", "train.batch_size=64", *overrides])
    checkpoint = folder / "small/checkpoints/epoch_0002"
    tables = [part for field in FIELDS for part in read_field(checkpoint, field)]
    return without_times(folder / "small"), tables


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    return run_in("kernels", tmp_path_factory.mktemp("swept") / "run", ["train.epochs=2"])


def test_a_run_with_evaluations_within_an_epoch(swept, tmp_path):
    metrics, tables = run_in("waiting", tmp_path / "run", ["train.epochs=2"])
    assert metrics == swept[0]
    assert all(map(torch.equal, tables, swept[1]))


def test_a_run_that_is_continued_from_a_checkpoint(swept, tmp_path):
    parts = ["train.epochs=1"], ["train.epochs=2", "checkpoint.resume=auto"]
    metrics, tables = run_in("waiting", tmp_path / "run", *parts)
    assert metrics == swept[0]
    assert all(map(torch.equal, tables, swept[1]))


def test_rows_wait_on_where_an_epoch_is_not_evaluated(tmp_path, monkeypatch):
    flushes, flush = [], CowClipTables.flush

    def counted(tables):
        flushes.append(int(tables.step_count))
        flush(tables)

    monkeypatch.setattr(CowClipTables, "flush", counted)
    found = []
    for every in (1, 2):
        flushes.clear()
        folder = tmp_path / str(every)
        folder.mkdir()
        overrides = ["train.epochs=4", f"evaluate.every_epochs={every}", "train.batch_size=64"]
        with computed("waiting", window=4):
            run_small(folder, overrides)
        summary = json.loads((folder / "small/summary.json").read_text())
        found.append((summary["auc"], summary["logloss"], summary["steps"]))
        # Those in which the last step of an epoch was the newest.
        ends = [summary["steps"] * epoch // 4 for epoch in (1, 2, 3, 4)]
        assert {epoch for epoch, step in enumerate(ends, 1) if step in flushes} == set(
            range(every, 5, every)
        )
        assert summary["train_seconds"] > 0
    assert found[0] == found[1]
