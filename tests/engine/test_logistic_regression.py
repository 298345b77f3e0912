"""Logistic regression against scikit-learn's on the same features."""

import numpy as np
import pytest
import scipy.sparse
from sklearn.linear_model import LogisticRegression as Reference
from sklearn.metrics import log_loss, roc_auc_score

from stampede.data.prepared.reader import open_prepared
from stampede.engine import logistic_regression as module
from stampede.engine.logistic_regression import LogisticRegression, logistic_regression
from support.prepared import drawn_fields, drawn_rows, write_prepared

VOCABULARY = 60


def drawn(rows, seed, weight, multi):
    """Rows whose clicks follow their ids and numbers; validation and test have unseen ids."""
    arrays = drawn_rows(rows, multi=multi, weight=weight, vocabulary=VOCABULARY, seed=seed)
    if seed == 0:
        # The training part lacks the last ids.
        for name in ("ids", "values_0"):
            if name in arrays:
                arrays[name] = np.minimum(arrays[name], VOCABULARY - 10)
    arrays["numbers"][:, 0] = np.log1p(arrays["numbers"][:, 0])
    truth = np.random.default_rng(9).normal(0, 0.7, VOCABULARY)
    logits = truth[arrays["ids"]].sum(1) + arrays["numbers"][:, 1] - 1
    if multi:
        logits += dense(arrays, multi)[:, -VOCABULARY:] @ truth[::-1]
    draw = np.random.default_rng(seed + 100)
    arrays["label"] = (draw.random(rows) < 1 / (1 + np.exp(-logits))).astype(np.uint8)
    return arrays


def dense(arrays, multi):
    """Counts of every field's ids, `[rows, numbers + fields * vocabulary]`."""
    rows = len(arrays["label"])
    columns = [arrays["numbers"]]
    columns += [np.eye(VOCABULARY)[ids] for ids in arrays["ids"].T]
    for i in range(multi):
        counts = np.zeros((rows, VOCABULARY))
        sample = np.repeat(np.arange(rows), np.diff(arrays[f"offsets_{i}"]))
        np.add.at(counts, (sample, arrays[f"values_{i}"]), 1)
        columns.append(counts)
    return np.concatenate(columns, 1)


@pytest.mark.parametrize("weight, multi", [(False, 0), (True, 1)])
def test_it_is_scikit_learns(tmp_path, monkeypatch, weight, multi):
    monkeypatch.setattr(module, "_CHUNK_ROWS", 700)
    parts = {
        name: drawn(rows, seed, weight, multi)
        for seed, (name, rows) in enumerate({"train": 3000, "validation": 500, "test": 900}.items())
    }
    fields = drawn_fields(multi=multi, vocabulary=VOCABULARY)
    dataset = open_prepared(write_prepared(tmp_path, parts, fields, shard_rows=1100))
    weights = {name: arrays.get("weight", np.ones(len(arrays["label"])))
               for name, arrays in parts.items()}  # fmt: skip
    reference = Reference(C=0.1, solver="newton-cholesky", tol=1e-9, max_iter=1000)
    features = scipy.sparse.csr_matrix(dense(parts["train"], multi)).toarray()
    mean_one = weights["train"] / weights["train"].mean()
    reference.fit(features, parts["train"]["label"], mean_one)

    result = logistic_regression(dataset)
    for name in ("validation", "test"):
        predicted = reference.predict_proba(dense(parts[name], multi))[:, 1]
        given = parts[name]["label"], predicted
        auc = roc_auc_score(*given, sample_weight=weights[name])
        assert auc > 0.6 and result[f"{name}_auc"] == pytest.approx(auc, abs=1e-4)
        loss = log_loss(*given, sample_weight=weights[name])
        assert result[f"{name}_logloss"] == pytest.approx(loss, abs=1e-4)
    assert result["seconds"] > 0


def test_rows_that_are_not_kept_are_read_again_and_give_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_CHUNK_ROWS", 200)
    parts = {name: drawn(1000, seed, False, 1) for seed, name in enumerate(("train", "test"))}
    fields = drawn_fields(multi=1, vocabulary=VOCABULARY)
    dataset = open_prepared(write_prepared(tmp_path, parts, fields))
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
    parts = {name: drawn(300, seed, False, 0) for seed, name in enumerate(("train", "test"))}
    parts["train"]["label"][:] = 1
    dataset = open_prepared(write_prepared(tmp_path, parts, drawn_fields(vocabulary=VOCABULARY)))
    with pytest.raises(ValueError, match="one class"):
        logistic_regression(dataset)
