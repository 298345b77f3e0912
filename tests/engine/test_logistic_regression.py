"""Logistic regression against scikit-learn's on the same features."""

import json

import pytest
from sklearn.linear_model import LogisticRegression as Reference
from sklearn.metrics import log_loss, roc_auc_score
from threadpoolctl import threadpool_info, threadpool_limits

from stampede.engine import logistic_regression as module
from stampede.engine.config.load import load_config
from stampede.engine.logistic_regression import logistic_regression
from stampede.engine.run import run
from support.baselines import VOCABULARY, dense, drawn, opened


# A third of the rows chooses C in the second case.
@pytest.mark.parametrize("choosing", [50_000, 1000])
def test_it_is_scikit_learns_on_dense_columns(tmp_path, monkeypatch, choosing):
    monkeypatch.setattr(module, "_CHUNK_ROWS", 700)
    monkeypatch.setattr(module, "_CHOOSING_ROWS", choosing)
    parts = {"train": drawn(3000, 0), "validation": drawn(500, 1), "test": drawn(900, 2)}
    dataset = opened(tmp_path, parts, shard_rows=1100)
    train = parts["train"]
    counts = (dense(train) != 0).sum(0)

    def expected(strength, columns, rows):
        reference = Reference(C=strength, solver="newton-cholesky", tol=1e-9, max_iter=1000)
        weight = train["weight"] / train["weight"].mean()
        reference.fit(dense(train)[rows][:, columns], train["label"][rows], weight[rows])
        found = {}
        for name in ("validation", "test"):
            label, weight = parts[name]["label"], parts[name]["weight"]
            predicted = reference.predict_proba(dense(parts[name])[:, columns])[:, 1]
            auc = roc_auc_score(label, predicted, sample_weight=weight)
            loss = log_loss(label, predicted, sample_weight=weight)
            found |= {f"{name}_auc": auc, f"{name}_logloss": loss}
        return found

    def worth(case):
        return tried[case]["validation_auc"] - tried[case]["validation_logloss"]

    some, numbers = slice(None, None, 3 if choosing < 3000 else 1), parts["train"]["numbers"]
    all_columns = [c for c, count in enumerate(counts) if count]
    fields = range(numbers.shape[1], len(counts), VOCABULARY)
    shared = [first + dataset.unseen_rows[name] for name, first in zip(
        dataset.vocabulary_sizes, fields, strict=True) if name in dataset.unseen_rows]  # fmt: skip
    own = [column for column in all_columns if column not in shared]
    frequent = [c for c in own if c < numbers.shape[1] or counts[c] >= 5]
    grid = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
    tried = {(one, "all"): expected(one, all_columns, some) for one in grid}
    strength = max(tried, key=worth)[0]
    for name, columns in (("own", own), ("frequent", frequent)):
        if len(columns) < len(all_columns):
            tried[strength, name] = expected(strength, columns, some)
    chosen = max(tried, key=worth)[1]
    best = {"all": all_columns, "own": own, "frequent": frequent}[chosen]
    result = logistic_regression(dataset)
    assert result["C"] == strength and result["test_auc"] > 0.6
    assert result["columns"] == len(best)
    for name, value in expected(strength, best, slice(None)).items():
        assert result[name] == pytest.approx(value, abs=5e-4)


def test_without_a_validation_part(tmp_path):
    result = logistic_regression(opened(tmp_path, {"train": drawn(900, 0), "test": drawn(90, 1)}))
    assert result["C"] == 0.1 and "validation_auc" not in result


def test_one_thread_fits(tmp_path, monkeypatch):
    """Several wait for each other, some hundred times in a fit."""
    pools, fit = [], Reference.fit

    def noted(*arguments):
        pools.append({pool["num_threads"] for pool in threadpool_info()})
        return fit(*arguments)

    monkeypatch.setattr(Reference, "fit", noted)
    parts = {"train": drawn(300, 0), "test": drawn(90, 2)}
    with threadpool_limits(2):
        logistic_regression(opened(tmp_path, parts))
        assert {pool["num_threads"] for pool in threadpool_info()} == {2}
    assert pools == [{1}]


def test_one_class_is_refused(tmp_path):
    train = drawn(300, 0)
    train["label"][:] = 1
    with pytest.raises(ValueError, match="2 classes"):
        logistic_regression(opened(tmp_path, {"train": train, "test": train}))


@pytest.mark.wide
def test_the_network_lr_is_the_same_model(tmp_path):
    """Its L2 is that of the C which validation chose, and its training ends in the minimum."""
    size = ["data.rows=6000", "data.test_rows=3000", "data.scale=0.0001"]
    path = tmp_path / "lr.yaml"
    path.write_text("")
    given = [f"run.dir={tmp_path}", "model.name=lr", "evaluate.compare_with_trees=false"]
    run(load_config(path, [*given, *size]))
    summary = json.loads((tmp_path / "lr/summary.json").read_text())
    regression = summary["logistic_regression"]
    assert summary["best_epoch"] == 20 and summary["auc"] > 0.6
    assert summary["auc"] == pytest.approx(regression["test_auc"], abs=1e-3)
    assert summary["logloss"] == pytest.approx(regression["test_logloss"], abs=2e-3)
    rows = summary["rows"]["train"]
    used = load_config(tmp_path / "lr/config.yaml").optim.embedding.l2
    assert used == pytest.approx(16 / (2 * regression["C"] * rows))
