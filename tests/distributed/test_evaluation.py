"""Equal scores give equal metrics, to the last bit, on any number of ranks."""

import json
from pathlib import Path

import numpy as np
import pytest
from torch import nn

import stampede.engine.training.evaluate as evaluation
from stampede.data import GlobalBatches
from stampede.data.prepared.reader import open_prepared
from stampede.engine import metrics
from stampede.engine.config.evaluate import EvaluateSection
from stampede.engine.errors import TrainingStoppedError
from stampede.engine.metrics import PartMetrics
from stampede.engine.processes import processes
from support.jobs import lines, run_small
from support.movie_runs import prepare_movies, summary_of, train_on_movies
from support.prepared import drawn_fields, drawn_rows, write_prepared
from support.ranks import run_ranks

BATCH = 128


def scored_rows(rows, weighted, seed=0):
    """Rows whose first number is their score, with ties; `ids[:, 0]` makes 40 groups.

    `write_prepared` says that row 0 is that of missing values.
    """
    arrays = drawn_rows(rows, weight=weighted, vocabulary=40, seed=seed)
    draw = np.random.default_rng(seed)
    arrays["numbers"][:, 0] = (arrays["label"] + draw.normal(-1, 1, rows)).round(2)
    return arrays


def write_scored(folder: Path, rows, weighted):
    return write_prepared(
        folder,
        {"train": scored_rows(10, weighted), "test": scored_rows(rows, weighted, seed=1)},
        drawn_fields(vocabulary=40),
    )


class KnownScores(nn.Module):
    def forward(self, sparse, dense):
        return dense[:, 0]


def evaluate_known(folder, settings):
    """The evaluation of the test part by this rank, as the engine does it, or why it stopped."""
    evaluation._TOGETHER = 500
    dataset = open_prepared(folder)
    fields, unknown = list(dataset.vocabulary_sizes), dataset.unknown_rows
    with processes("cpu") as here:
        where = here.rank, here.world_size
        batches = GlobalBatches(dataset.test, fields, BATCH, *where, unknown_rows=unknown)
        try:
            return evaluation.evaluate(KnownScores(), batches, here, EvaluateSection(**settings))
        except TrainingStoppedError as failure:
            return str(failure)


def evaluate_without_memory(folder, settings):
    """The same if the scores cannot be sorted."""

    def fails(*_):
        raise MemoryError("Unable to allocate 7 TiB")

    metrics._Records.add = fails
    return evaluate_known(folder, settings)


# Full batches of 128 and a last one of 1 = ranks - 1 and 3 samples.
ROWS = {2: 3 * 128 + 1, 4: 40 * 128 + 3}


@pytest.mark.wide
@pytest.mark.parametrize("ranks, weighted", [(2, True), (4, False)])
def test_metrics_do_not_depend_on_the_ranks(tmp_path, ranks, weighted):
    from sklearn.metrics import log_loss, roc_auc_score

    rows = ROWS[ranks]
    folder = write_scored(tmp_path / "data", rows, weighted)
    settings = {"group_by": "C1"}
    alone = evaluate_known(folder, settings)
    for found in run_ranks(ranks, evaluate_known, folder, settings):
        assert found == alone
    arrays = scored_rows(rows, weighted, seed=1)
    scores, label, weight = arrays["numbers"][:, 0], arrays["label"], arrays.get("weight")
    assert alone["samples"] == rows
    expected = roc_auc_score(label, scores, sample_weight=weight)
    assert alone["auc"] == pytest.approx(expected, abs=1e-12)
    clicked = 1 / (1 + np.exp(-scores.astype(np.float64)))
    expected = log_loss(label, clicked, sample_weight=weight)
    assert alone["logloss"] == pytest.approx(expected, rel=1e-9)
    # Row 0 is that of missing values.
    known = arrays["ids"][:, 0] > 0
    by_group = PartMetrics([])
    known_weight = np.ones(known.sum(), np.float32) if weight is None else weight[known]
    by_group.add(scores[known], label[known], known_weight, arrays["ids"][known, 0])
    expected = by_group.result()["gauc"]
    assert alone["gauc_unknown_samples"] == (~known).sum() > 0
    assert alone["gauc"] == pytest.approx(expected, abs=1e-12)
    together = alone["gauc_groups"] + alone["gauc_left_out"]
    assert together == len(np.unique(arrays["ids"][known, 0]))


@pytest.mark.slow
def test_memory_that_is_not_there_stops_all_ranks_with_a_sentence(tmp_path):
    folder = write_scored(tmp_path / "data", 2000, weighted=False)
    error, of_rank_1 = run_ranks(2, evaluate_without_memory, folder, {"group_by": "C1"})
    assert error == of_rank_1
    for word in ("2,000 samples, some 60 bytes", "Unable to allocate 7 TiB", "resume=auto"):
        assert word in error


@pytest.mark.slow
def test_users_that_are_rare_or_unseen_are_no_group(tmp_path, capsys):
    run = train_on_movies(prepare_movies(tmp_path), "evaluate.group_by=user")
    found, printed = summary_of(run), capsys.readouterr().out
    (prepared,) = (tmp_path / "cache").iterdir()
    users = np.load(next(prepared.glob("test-*ids.npy")))[:, 0]
    # The first two rows of the table are that of missing users, and of rare and unseen ones.
    assert found["gauc_unknown_samples"] == (users < 2).sum() > 0
    assert found["gauc_groups"] + found["gauc_left_out"] == len(np.unique(users[users > 1])) > 1
    assert f"not in GAUC     {found['gauc_unknown_samples']} samples whose id is" in printed


@pytest.mark.slow
def test_ranks_stop_early_and_reduce_rates_together(tmp_path):
    overrides = ["train.epochs=12", "evaluate.patience=2", "optim.embedding.lr=0.1",
                 "optim.dense.schedule.warmup=0",
                 "optim.dense.plateau={factor: 0.5, patience: 0}"]  # fmt: skip
    run_ranks(2, run_small, tmp_path, overrides, 2)
    summary = json.loads((tmp_path / "small/summary.json").read_text())
    assert summary["stopped_early"] and summary["epochs"] == summary["best_epoch"] + 2
    rates = [line["dense_lr"] for line in lines(tmp_path / "small") if line["kind"] == "train"]
    assert rates[-1] in (pytest.approx(rates[0] / 2), pytest.approx(rates[0] / 4))


@pytest.mark.wide
def test_two_ranks_fit_the_regression_and_advise_as_one(tmp_path):
    """Rank 0 fits it, while the other one waits."""
    found = []
    for ranks in (1, 2):
        overrides = ["evaluate.compare_with_lr=true", f"run.name=of_{ranks}"]
        run_ranks(ranks, run_small, tmp_path, overrides, ranks)
        found.append(json.loads((tmp_path / f"of_{ranks}/summary.json").read_text()))
        del found[-1]["logistic_regression"]["seconds"]
        logged = lines(tmp_path / f"of_{ranks}")
        said = [line["text"] for line in logged if line["kind"] == "advice"]
        assert said == found[-1]["advice"] != []
    assert found[0]["logistic_regression"] == found[1]["logistic_regression"]
    assert found[0]["advice"][0] == found[1]["advice"][0]
