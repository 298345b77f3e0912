"""Logistic regression against scikit-learn's on the same features."""

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression as Reference
from sklearn.metrics import log_loss, roc_auc_score

from stampede.data.prepared.reader import open_prepared
from stampede.engine import logistic_regression as module
from stampede.engine.logistic_regression import LogisticRegression, logistic_regression
from support.prepared import drawn_fields, drawn_rows, write_prepared

VOCABULARY = 60


def drawn(rows, seed):
    """Rows whose clicks follow their ids and numbers; validation and test have unseen ids."""
    arrays = drawn_rows(rows, multi=1, weight=True, vocabulary=VOCABULARY, seed=seed)
    if seed == 0:
        # The training part lacks the last ids.
        for name in ("ids", "values_0"):
            arrays[name] = np.minimum(arrays[name], VOCABULARY - 10)
    arrays["numbers"][:, 0] = np.log1p(arrays["numbers"][:, 0])
    truth = np.random.default_rng(9).normal(0, 0.7, VOCABULARY)
    logits = truth[arrays["ids"]].sum(1) + arrays["numbers"][:, 1] - 1
    logits += dense(arrays)[:, -VOCABULARY:] @ truth[::-1]
    draw = np.random.default_rng(seed + 100)
    arrays["label"] = (draw.random(rows) < 1 / (1 + np.exp(-logits))).astype(np.uint8)
    return arrays


def dense(arrays):
    """Counts of every field's ids, `[rows, numbers + fields * vocabulary]`."""
    counts = np.zeros((len(arrays["label"]), VOCABULARY))
    sample = np.repeat(np.arange(len(counts)), np.diff(arrays["offsets_0"]))
    np.add.at(counts, (sample, arrays["values_0"]), 1)
    columns = [np.eye(VOCABULARY)[ids] for ids in arrays["ids"].T]
    return np.concatenate([arrays["numbers"], *columns, counts], 1)


def opened(folder, parts, **options):
    fields = drawn_fields(multi=1, vocabulary=VOCABULARY)
    return open_prepared(write_prepared(folder, parts, fields, **options))


def test_it_is_scikit_learns(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_CHUNK_ROWS", 700)
    parts = {"train": drawn(3000, 0), "validation": drawn(500, 1), "test": drawn(900, 2)}
    dataset = opened(tmp_path, parts, shard_rows=1100)
    train = parts["train"]
    reference = Reference(C=0.1, solver="newton-cholesky", tol=1e-9, max_iter=1000)
    reference.fit(dense(train), train["label"], train["weight"] / train["weight"].mean())

    result = logistic_regression(dataset)
    for name in ("validation", "test"):
        label, weight = parts[name]["label"], parts[name]["weight"]
        predicted = reference.predict_proba(dense(parts[name]))[:, 1]
        auc = roc_auc_score(label, predicted, sample_weight=weight)
        assert auc > 0.6 and result[f"{name}_auc"] == pytest.approx(auc, abs=1e-4)
        loss = log_loss(label, predicted, sample_weight=weight)
        assert result[f"{name}_logloss"] == pytest.approx(loss, abs=1e-4)


def test_rows_that_are_not_kept_are_read_again_and_give_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_CHUNK_ROWS", 200)
    dataset = opened(tmp_path, {"train": drawn(1000, 0), "test": drawn(1000, 1)})
    results, kept = [], []
    for room in (1e9, 20_000, 0):
        monkeypatch.setattr(module, "_KEPT_BYTES", room)
        model = LogisticRegression(dataset)
        model.fit()
        results.append(model.scores(dataset.test))
        kept.append(len(model._kept))
    assert kept[0] == 5 and 0 < kept[1] < 5 and kept[2] == 0
    assert results[0] == results[1] == results[2]


def test_one_class_is_refused(tmp_path):
    train = drawn(300, 0)
    train["label"][:] = 1
    with pytest.raises(ValueError, match="one class"):
        logistic_regression(opened(tmp_path, {"train": train, "test": train}))
