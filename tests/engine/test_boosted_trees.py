"""LightGBM beside a run, against LightGBM on columns that the test makes itself."""

import sys

import lightgbm
import numpy as np
import pytest
from sklearn.metrics import log_loss, roc_auc_score

from stampede.engine.boosted_trees import _MOST_FREQUENT, boosted_trees
from stampede.engine.logistic_regression import logistic_regression
from support.baselines import VOCABULARY, drawn, opened


def columns(arrays, frequent):
    """Categories, counts of the frequent ids of several, numbers."""
    counts = np.zeros((len(arrays["label"]), VOCABULARY))
    sample = np.repeat(np.arange(len(counts)), np.diff(arrays["offsets_0"]))
    np.add.at(counts, (sample, arrays["values_0"]), 1)
    return np.hstack([arrays["ids"], counts[:, frequent], arrays["numbers"]], dtype=np.float32)


def test_it_is_lightgbm_on_these_columns(tmp_path):
    parts = {"train": drawn(3000, 0), "validation": drawn(500, 1), "test": drawn(900, 2)}
    found = boosted_trees(opened(tmp_path, parts, shard_rows=1100))
    everything = columns(parts["train"], np.arange(VOCABULARY))
    fields = parts["train"]["ids"].shape[1]
    rows = (everything[:, fields : fields + VOCABULARY] > 0).sum(0)
    frequent = np.argsort(-rows, kind="stable")[:_MOST_FREQUENT]
    sets = {
        name: lightgbm.Dataset(columns(one, frequent), one["label"], weight=one["weight"],
                               categorical_feature=list(range(fields)), free_raw_data=False)
        for name, one in parts.items()
    }  # fmt: skip
    valid = sets["validation"].set_reference(sets["train"])
    given = {"objective": "cross_entropy", "learning_rate": 0.1, "feature_fraction": 0.5,
             "lambda_l2": 5, "seed": 1, "deterministic": True, "force_row_wise": True,
             "verbose": -1, "num_leaves": found["leaves"]}  # fmt: skip
    model = lightgbm.train(given, sets["train"], found["trees"], [valid])
    for name in ("validation", "test"):
        one = parts[name]
        scores = model.predict(columns(one, frequent))
        auc = roc_auc_score(one["label"], scores, sample_weight=one["weight"])
        loss = log_loss(one["label"], scores, sample_weight=one["weight"])
        assert found[f"{name}_auc"] == pytest.approx(auc, abs=1e-6)
        assert found[f"{name}_logloss"] == pytest.approx(loss, abs=1e-6)
    assert found["trees"] >= 1 and found["seconds"] > 0


def test_trees_see_what_a_linear_model_cannot(tmp_path):
    parts = {name: drawn(2000, seed) for seed, name in enumerate(("train", "validation", "test"))}
    for one in parts.values():
        first, second = (one["numbers"][:, n] > np.median(one["numbers"][:, n]) for n in (0, 1))
        one["label"] = (first ^ second).astype(np.uint8)
    dataset = opened(tmp_path, parts)
    assert boosted_trees(dataset)["test_auc"] > 0.95
    assert logistic_regression(dataset)["test_auc"] < 0.9


def test_none_without_a_validation_part_or_without_lightgbm(tmp_path, monkeypatch):
    parts = {"train": drawn(300, 0), "test": drawn(90, 1)}
    assert boosted_trees(opened(tmp_path / "two", parts)) is None
    dataset = opened(tmp_path / "three", {**parts, "validation": drawn(90, 2)})
    assert boosted_trees(dataset) is not None
    monkeypatch.setitem(sys.modules, "lightgbm", None)
    assert boosted_trees(dataset) is None


def test_a_lightgbm_that_fails_does_not_fail_the_run(tmp_path, monkeypatch):
    parts = {"train": drawn(300, 0), "validation": drawn(90, 1), "test": drawn(90, 2)}
    dataset = opened(tmp_path, parts)

    def fails(*_, **__):
        raise lightgbm.basic.LightGBMError("no memory")

    monkeypatch.setattr(lightgbm, "train", fails)
    with pytest.raises(ValueError, match="LightGBM: no memory"):
        boosted_trees(dataset)
    # As in a container without libgomp.
    (tmp_path / "lightgbm.py").write_text("raise OSError('libgomp.so.1: cannot open')")
    monkeypatch.delitem(sys.modules, "lightgbm")
    monkeypatch.syspath_prepend(tmp_path)
    assert boosted_trees(dataset) is None
