"""Equal scores give equal metrics, to the last bit, on any number of ranks."""

import json

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from stampede.engine.errors import TrainingStoppedError
from stampede.engine.metrics import gauc, logloss
from support.evaluating import (
    evaluate_known,
    evaluate_with_a_full_disk,
    evaluate_without_memory,
    run_by_user,
    scored_rows,
    write_scored,
)
from support.jobs import lines, run_small
from support.movie_runs import prepare_movies, summary_of
from support.ranks import run_ranks

# Full batches of 128 and a last one of 1 = ranks - 1 and 3 samples.
ROWS = {2: 3 * 128 + 1, 4: 40 * 128 + 3}


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("weighted", [False, True])
def test_metrics_do_not_depend_on_the_ranks(tmp_path, ranks, weighted):
    rows = ROWS[ranks]
    folder = write_scored(tmp_path / "data", rows, weighted)
    # 1000 samples are kept in memory.
    settings = {"group_by": "C1", "memory_gb": 1e-6}
    alone = evaluate_known(folder, settings, tmp_path)
    for found in run_ranks(ranks, evaluate_known, folder, settings, tmp_path):
        assert found == alone
    arrays = scored_rows(rows, weighted, seed=1)
    scores, label, weight = arrays["numbers"][:, 0], arrays["label"], arrays.get("weight")
    assert alone.samples == rows
    expected = roc_auc_score(label, scores, sample_weight=weight)
    assert alone.auc == pytest.approx(expected, abs=1e-12)
    assert alone.logloss == pytest.approx(logloss(scores, label, weight), rel=1e-12)
    # Row 0 is that of missing values.
    known = arrays["ids"][:, 0] > 0
    known_weight = None if weight is None else weight[known]
    expected = gauc(scores[known], label[known], arrays["ids"][known, 0], known_weight)
    assert alone.further["gauc_unknown_samples"] == (~known).sum() > 0
    assert alone.further["gauc"] == pytest.approx(expected, abs=1e-12)
    together = alone.further["gauc_groups"] + alone.further["gauc_left_out"]
    assert together == len(np.unique(arrays["ids"][known, 0]))
    in_memory = evaluate_known(folder, {"group_by": "C1"})
    assert in_memory.auc == pytest.approx(alone.auc, abs=1e-12)
    assert in_memory.further["gauc"] == pytest.approx(alone.further["gauc"], abs=1e-12)


def test_a_full_disk_stops_all_ranks_with_a_sentence(tmp_path):
    folder = write_scored(tmp_path / "data", 5000, weighted=False)
    (tmp_path / "scratch").mkdir()
    said = run_ranks(
        2, evaluate_with_a_full_disk, folder, {"memory_gb": 1e-6}, tmp_path / "scratch"
    )
    assert said[0] == said[1]
    message, left = said[0]
    for word in (str(tmp_path / "scratch"), "File too large", "evaluate.memory_gb", "resume=auto"):
        assert word in message
    assert left == []


def test_scores_are_kept_in_the_folder_that_is_given(tmp_path):
    folder = write_scored(tmp_path / "data", 2000, weighted=False)
    with pytest.raises(TrainingStoppedError, match="absent"):
        evaluate_known(folder, {"memory_gb": 1e-6}, tmp_path / "absent")


def test_more_memory_than_there_is_may_be_allowed_where_the_part_needs_less(tmp_path):
    folder = write_scored(tmp_path / "data", 2000, weighted=False)
    some = evaluate_known(folder, {"group_by": "C1"})
    assert evaluate_known(folder, {"group_by": "C1", "memory_gb": 1e7}) == some


def test_memory_that_is_not_there_stops_all_ranks_with_a_sentence(tmp_path):
    folder = write_scored(tmp_path / "data", 2000, weighted=False)
    said = run_ranks(2, evaluate_without_memory, folder, {"memory_gb": 7000})
    assert said[0] == said[1]
    for word in ("evaluate.memory_gb: found 7000", "Unable to allocate 7 TiB", "write less"):
        assert word in said[0]


def test_users_that_are_rare_or_unseen_are_no_group(tmp_path, capsys):
    prepare_movies(tmp_path)
    alone = summary_of(run_by_user(tmp_path))
    printed = capsys.readouterr().out
    (prepared,) = (tmp_path / "cache").iterdir()
    users = np.load(next(prepared.glob("test-*ids.npy")))[:, 0]
    # The first two rows of the table are that of missing users, and of rare and unseen ones.
    assert alone["gauc_unknown_samples"] == (users < 2).sum() > 0
    together = alone["gauc_groups"] + alone["gauc_left_out"]
    assert together == len(np.unique(users[users > 1])) > 1
    assert f"not in GAUC     {alone['gauc_unknown_samples']} samples whose id is" in printed
    # The test's own paths may be longer.
    tables = [line for line in printed.splitlines() if str(tmp_path) not in line]
    assert max(map(len, tables)) <= 100
    for ranks in (2, 4):
        path, *_ = run_ranks(ranks, run_by_user, tmp_path, ranks)
        found = summary_of(path)
        for name in ("gauc_unknown_samples", "gauc_groups", "gauc_left_out"):
            assert found[name] == alone[name], (ranks, name)
        assert found["gauc"] == pytest.approx(alone["gauc"], abs=0.05)


def test_ranks_stop_early_and_reduce_rates_together(tmp_path):
    overrides = ["train.epochs=8", "evaluate.patience=2", "optim.embedding.lr=0.05",
                 "optim.dense.schedule.warmup=0",
                 "optim.dense.plateau={factor: 0.5, patience: 0}"]  # fmt: skip
    run_ranks(2, run_small, tmp_path, overrides, 2)
    summary = json.loads((tmp_path / "small/summary.json").read_text())
    assert summary["stopped_early"] and summary["epochs"] == summary["best_epoch"] + 2
    rates = [line["dense_lr"] for line in lines(tmp_path / "small") if line["kind"] == "train"]
    assert rates[-1] == pytest.approx(rates[0] / 2)
