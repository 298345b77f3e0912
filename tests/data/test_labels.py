"""Labels in every form, soft ones, and what the metrics make of them."""

import numpy as np
import pandas as pd
import pytest
import yaml
from sklearn.metrics import average_precision_score, log_loss, roc_auc_score

from stampede.data import DataError
from stampede.data.guess import guess
from stampede.data.raw.log import RawLog
from stampede.data.raw.rows import BadRows
from stampede.data.schema.schema import Schema
from stampede.engine.metrics import PartMetrics
from support.movie_runs import ROWS, prepare_movies, summary_of, train_on_movies
from support.movies import MOVIES, movies, write_movies
from support.predicting import scores
from support.prepared_arrays import arrays_of, manifest_of
from support.preparing import table

TRUTH = np.random.default_rng(0).integers(0, 2, 200)


def log(path, labels):
    frame = pd.DataFrame({"clicked": labels, "user": np.arange(len(labels)) % 9})
    if path.suffix == ".csv":
        frame.to_csv(path, index=False)
    else:
        frame.to_parquet(path)
    return path


def read(path, label="clicked"):
    schema = Schema.model_validate({"label": label, "ids": ["user"]})
    return next(RawLog(schema, [path]).chunks(BadRows("error"))).frame["#label"].to_list()


@pytest.mark.parametrize("form", ["csv", "parquet"])
@pytest.mark.parametrize(
    "no, yes",
    [
        (False, True), ("false", "true"), ("False", "True"), ("no", "yes"), ("N", "Y"), ("f", "t"),
        (-1, 1), (-1.0, 1.0), ("-1", "1"), (0.0, 1.0), (" NO ", "yes"),
    ],
)  # fmt: skip
def test_labels_of_two_values(tmp_path, no, yes, form):
    path = log(tmp_path / f"log.{form}", [[no, yes][one] for one in TRUTH])
    assert read(path) == TRUTH.tolist()
    assert guess([path]).schema["label"] == "clicked"


@pytest.mark.parametrize("form", ["csv", "parquet"])
@pytest.mark.parametrize(
    "values, clicks",
    [
        (["view", "buy"], ["buy"]), ([1, 2], ["2"]), ([-1, 0, 1], ["1"]), ([1.0, 2.0], ["2"]),
        ([1, 2, 3, 4, 5], ["4", "5"]), (["no", "yes", "maybe"], ["maybe", "yes"]),
    ],
)  # fmt: skip
def test_other_labels_are_refused_with_a_remedy_that_works(tmp_path, values, clicks, form):
    drawn = np.random.default_rng(1).integers(0, len(values), 200)
    path = log(tmp_path / f"log.{form}", [values[one] for one in drawn])
    with pytest.raises(DataError, match=r"column clicked: found .*positive: \[") as refused:
        read(path)
    said = yaml.safe_load(str(refused.value).split("`")[1])["label"]
    assert 0 < np.mean(read(path, said)) < 1
    texts = [f"{one:g}" if not isinstance(one, str) else one for one in values]
    expected = [float(texts[one] in clicks) for one in drawn]
    assert read(path, {"column": "clicked", "positive": clicks}) == expected
    # Describing gives a schema that reads all rows.
    guessed = guess([path])
    assert "guessed {column: clicked" in guessed.reason[-1]
    assert 0 < np.mean(read(path, guessed.schema["label"])) < 1


def test_minus_one_beside_zero_in_another_block_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("stampede.data.raw.files.BLOCK_BYTES", 40)
    path = log(tmp_path / "log.csv", [*[1, -1] * 40, 0])
    schema = Schema.model_validate({"label": "clicked", "ids": ["user"]})
    with pytest.raises(DataError, match=r"log.csv: column clicked: found labels -1 and 0"):
        list(RawLog(schema, [path]).chunks(BadRows("skip")))


def test_mistakes_in_the_schema():
    for label, said in (
        ({"column": "y", "positive": [True]}, "in quotes"),
        ({"column": "y", "positive": ["a"], "at_least": 1}, "write one of them"),
    ):
        with pytest.raises(ValueError, match=said):
            Schema.model_validate({"label": label, "ids": ["user"]})


def soft(rows):
    draw = np.random.default_rng(2)
    labels = np.where(draw.random(rows) < 0.5, draw.random(rows), draw.integers(0, 2, rows))
    return labels.astype(np.float32)


def test_soft_labels_are_stored(tmp_path):
    frame = pd.DataFrame({"y": soft(300), "user": np.arange(300) % 9})
    table(tmp_path, frame, "label: y\nids: [user]\n")
    found = [arrays_of(tmp_path / "out", part)[0]["label"] for part in ("train", "validation")]
    assert found[0].dtype == np.float32
    np.testing.assert_array_equal(np.concatenate(found), frame["y"][:270])
    assert "are soft" in manifest_of(tmp_path / "out")["source"]["notes"][0]


@pytest.mark.parametrize("weighted", [False, True])
def test_metrics_of_soft_labels(weighted):
    """Against scikit-learn, with each sample twice: as a click and as none, with its shares."""
    rows, draw = 500, np.random.default_rng(3)
    labels, logits = soft(rows), draw.normal(size=rows).round(1).astype(np.float32)
    weights = draw.random(rows).astype(np.float32) if weighted else np.ones(rows, np.float32)
    groups = draw.integers(0, 7, rows)
    metrics = PartMetrics(["pr_auc", "calibration", "calibration_buckets"])
    for some in np.array_split(np.arange(rows), 3):
        metrics.add(logits[some], labels[some], weights[some], groups[some])
    found = metrics.result()
    truth = np.repeat([1, 0], rows)
    score, weight = np.tile(logits, 2), np.concatenate([weights * labels, weights * (1 - labels)])
    expected = roc_auc_score(truth, score, sample_weight=weight)
    assert found["auc"] == pytest.approx(expected, abs=1e-6)
    expected = average_precision_score(truth, score, sample_weight=weight)
    assert found["pr_auc"] == pytest.approx(expected, abs=1e-6)
    predicted = 1 / (1 + np.exp(-score.astype(float)))
    expected = log_loss(truth, predicted, sample_weight=weight)
    assert found["logloss"] == pytest.approx(expected, rel=1e-6)
    share = np.average(predicted[:rows], weights=weights) / np.average(labels, weights=weights)
    assert found["calibration"] == pytest.approx(share, rel=1e-6)
    each = [np.tile(groups, 2) == group for group in range(7)]
    aucs = [roc_auc_score(truth[one], score[one], sample_weight=weight[one]) for one in each]
    expected = np.average(aucs, weights=[weight[one].sum() for one in each])
    assert found["gauc"] == pytest.approx(expected, abs=1e-6)
    assert found["samples"] == rows and "calibration_buckets" not in found


@pytest.mark.slow
def test_a_run_on_soft_labels(tmp_path):
    prepare_movies(tmp_path, schema=MOVIES.replace("{column: rating, at_least: 4}", "rating"))
    frame = movies(ROWS)
    frame["rating"] = (frame["rating"] - 1) / 4
    write_movies(tmp_path / "log.csv", frame)
    run = train_on_movies(tmp_path, "evaluate.compare_with_lr=true")
    found = scores(run, ["@run"], tmp_path).to_pandas()
    np.testing.assert_allclose(found["label"], frame["rating"][-len(found) :], rtol=1e-6)
    truth, score = np.repeat([1, 0], len(found)), np.tile(found["score"], 2)
    weight = [found["weight"] * found["label"], found["weight"] * (1 - found["label"])]
    expected = roc_auc_score(truth, score, sample_weight=np.concatenate(weight))
    summary = summary_of(run)
    assert summary["auc"] == pytest.approx(expected, abs=1e-6)
    expected = log_loss(truth, score, sample_weight=np.concatenate(weight))
    assert summary["logloss"] == pytest.approx(expected, rel=1e-5)
    assert 0.3 < summary["logistic_regression"]["test_auc"] < 0.8
