"""Shipped configurations on real rows, beside logistic regression on the raw log."""

import json

import numpy as np
import polars as pl
import pytest
from sklearn.feature_extraction import FeatureHasher
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score

from stampede.engine.config.load import load_config
from stampede.engine.run import run
from support.paths import ROOT, shared

pytestmark = pytest.mark.slow

NUMBERS = [f"I{i}" for i in range(1, 14)]
CRITEO = ["label", *NUMBERS, *(f"C{i}" for i in range(1, 27))]


def criteo(path):
    frame = pl.read_csv(
        path,
        separator="\t",
        has_header=False,
        new_columns=CRITEO,
        schema_overrides=[pl.String] * 40,
        quote_char=None,
    )
    for name in NUMBERS:
        number = pl.col(name).cast(pl.Float64).clip(lower_bound=0)
        frame = frame.with_columns((2 * number.log1p()).floor().cast(pl.String).alias(name))
    return frame["label"], frame.drop("label"), 1 / 7, [0.03, 0.1]


def avazu(path):
    frame = pl.read_csv(path, infer_schema_length=0)
    frame = frame.with_columns(pl.col("hour").str.slice(6, 2))
    return frame["click"], frame.drop("click", "id"), 0.1, [0.03, 0.1, 0.3]


def auc_of_scikit_learn(label, columns, test_share, candidates):
    """On hashed `column=value`, C chosen on the validation part."""
    tokens = zip(
        *([f"{c}={v}" for v in columns[c].to_list()] for c in columns.columns), strict=True
    )
    features = FeatureHasher(2**20, input_type="string").transform(tokens)
    labels = label.cast(pl.Int8).to_numpy()
    held = int((1 - test_share) * len(labels))
    trained = held - int(0.1 * held)
    found = []
    for strength in candidates:
        model = LogisticRegression(C=strength, solver="liblinear")
        scores = model.fit(features[:trained], labels[:trained]).decision_function(features)
        aucs = [
            roc_auc_score(labels[part], scores[part])
            for part in (np.s_[trained:held], np.s_[held:])
        ]
        found.append(tuple(aucs))
    return max(found)[1]


@pytest.mark.parametrize(
    "config, file, read, margins",
    [
        ("criteo_kaggle", "criteo_kaggle_137k.tsv.gz", criteo, {"lr": -0.001, "deepfm": 0.002}),
        # Of 2,000 test rows: the AUC of one seed is within 0.002 of that of another.
        ("avazu", "avazu_20k.csv.gz", avazu, {"lr": -0.002, "deepfm": -0.002}),
    ],
)
def test_beside_scikit_learn(tmp_path, config, file, read, margins):
    path = shared(f"data/{file}")
    theirs = auc_of_scikit_learn(*read(path))
    for name, margin in margins.items():
        given = [f"data.path={path}", f"data.cache={tmp_path}", f"run.dir={tmp_path}"]
        given += [f"model.name={name}", f"run.name={name}"]
        run(load_config(ROOT / f"configs/{config}.yaml", given))
        ours = json.loads((tmp_path / name / "summary.json").read_text())["best_auc"]
        assert ours > theirs + margin
