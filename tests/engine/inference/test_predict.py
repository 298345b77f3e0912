"""Scores of raw files, prepared folders and a run's own data."""

import shutil

import numpy as np
import pandas as pd
import polars as pl
import pyarrow.parquet
import pytest
import torch
from polars.testing import assert_frame_equal
from sklearn.metrics import roc_auc_score

from stampede.data.apply import apply_learned
from stampede.data.options import WritingOptions
from stampede.data.raw import files as blocks
from stampede.engine.inference import prediction
from stampede.models import CTRModel
from support.jobs import run_small
from support.movie_runs import (
    ROWS,
    prepare_movies,
    rows_of_test_part,
    summary_of,
    train_on_movies,
)
from support.movies import movies, write_movies
from support.packages import columns_of, loaded
from support.predicting import main, predict, refused, scores
from support.ranks import run_ranks

pytestmark = pytest.mark.slow


def auc_of(frame):
    """Weighted, by scikit-learn."""
    return roc_auc_score(frame["label"], frame["score"], sample_weight=frame["weight"])


def train_as_ranks(folder, plan, world_size):
    """A run as a rank of several."""
    train_on_movies(folder, f"sharding.plan={plan}", world_size=world_size)


@pytest.mark.parametrize("form", ["csv", "csv.gz", "csv.zst", "tsv", "parquet"])
def test_the_auc_is_that_of_the_run(trained_run, tmp_path, form):
    path = write_movies(tmp_path / f"log.{form}", rows_of_test_part())
    found = scores(trained_run, [path], tmp_path)
    assert found.columns == ["file", "row", "score", "label", "weight"]
    assert auc_of(found) == pytest.approx(summary_of(trained_run)["best_auc"], abs=1e-6)


def test_a_file_has_the_scores_of_its_rows_in_whatever_pieces(trained_run, tmp_path, monkeypatch):
    frame = rows_of_test_part()
    whole = scores(trained_run, [write_movies(tmp_path / "log.csv", frame)], tmp_path)
    for i, part in enumerate((frame[:17], frame[17:18], frame[18:])):
        write_movies(tmp_path / f"part_{i + 9}.csv", part)
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 200)
    parts = scores(trained_run, [tmp_path / "part_*.csv"], tmp_path, "--batch-size", 7)
    assert parts["row"].to_list() == [*range(17), 0, *range(len(frame) - 18)]
    names = [str(tmp_path / f"part_{i}.csv") for i in (9, 10, 11)]
    assert parts["file"].to_list() == np.repeat(names, [17, 1, len(frame) - 18]).tolist()
    np.testing.assert_allclose(parts["score"], whole["score"], rtol=1e-6)
    # They are written as they come.
    assert pyarrow.parquet.ParquetFile(tmp_path / "scores.parquet").num_row_groups > 5


def test_a_csv_file_has_the_same(trained_run, tmp_path):
    log = write_movies(tmp_path / "log.csv", rows_of_test_part())
    expected = scores(trained_run, [log], tmp_path)
    status, said = predict(trained_run, log, tmp_path / "scores.csv")
    assert status == 0, said
    found = pl.read_csv(tmp_path / "scores.csv")
    found = found.cast({"label": pl.Float32, "weight": pl.Float32})
    assert_frame_equal(found, expected, check_dtypes=False, rel_tol=1e-12)


@pytest.mark.cases(1)
@pytest.mark.parametrize("world_size, plan", [(2, "data_parallel"), (4, "grid_shard")])
def test_checkpoints_of_several_ranks(tmp_path, world_size, plan):
    prepare_movies(tmp_path)
    run_ranks(world_size, train_as_ranks, tmp_path, plan, world_size, ranks_per_node=2)
    run = tmp_path / "movies"
    # The data may be gone.
    shutil.rmtree(tmp_path / "cache")
    for name in ("log.csv", "schema.yaml"):
        (tmp_path / name).unlink()
    found = scores(run, [write_movies(tmp_path / "new.csv", rows_of_test_part())], tmp_path)
    assert auc_of(found) == pytest.approx(summary_of(run)["best_auc"], abs=1e-6)


def test_the_epoch_is_chosen(trained_run, tmp_path, log):
    summary = summary_of(trained_run)
    best, last = summary["auc"], summary["last"]["test"]["auc"]
    assert summary["best_epoch"] == 1 and abs(best - last) > 1e-5
    for epoch, auc in (("best", best), ("1", best), ("newest", last), ("3", last)):
        found = auc_of(scores(trained_run, [log], tmp_path, "--epoch", epoch))
        assert found == pytest.approx(auc, abs=1e-6)
    found = auc_of(scores(trained_run / "checkpoints/epoch_0003", [log], tmp_path))
    assert found == pytest.approx(last, abs=1e-6)


@pytest.mark.wide
def test_labels_and_prepared_folders_make_no_difference(trained_run, tmp_path, log):
    raw = scores(trained_run, [log], tmp_path)
    frame = rows_of_test_part().drop(columns=["rating", "importance"])
    bare = write_movies(tmp_path / "bare.csv", frame)
    found = scores(trained_run, [bare], tmp_path)
    assert found.columns == ["file", "row", "score"]
    assert found["score"].to_list() == raw["score"].to_list()
    prepared = tmp_path / "prepared"
    apply_learned(trained_run / "inputs", str(log), WritingOptions(), prepared)
    assert scores(trained_run, [prepared], tmp_path).equals(raw.drop("file"))
    for given in (log, prepared, "@run"):
        labelled = scores(trained_run, [given], tmp_path)
        output = tmp_path / "bare.parquet"
        status, said = predict(trained_run, given, output, "--ignore-label", "--overwrite")
        assert status == 0 and "AUC" not in said
        assert pl.read_parquet(output).equals(labelled.drop("label", "weight", strict=False))


@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_rows_without_a_label_yet_are_scored(trained_run, tmp_path, log, form):
    whole = scores(trained_run, [log], tmp_path)
    frame = rows_of_test_part().astype({"rating": "Int64"})
    for gone in (slice(10, 30), slice(None)):
        frame.loc[frame.index[gone], "rating"] = None
        later = write_movies(tmp_path / f"later.{form}", frame)
        found = scores(trained_run, [later], tmp_path)
        assert found["score"].to_list() == whole["score"].to_list()
        null = found["label"].is_null().to_numpy()
        assert null.all() if gone == slice(None) else null.nonzero()[0].tolist() == [*range(10, 30)]
        status, said = predict(trained_run, later, tmp_path / "again.csv", "--overwrite")
        assert status == 0 and ("AUC" in said) == (gone != slice(None))
        if "AUC" in said:
            assert f"{auc_of(found.drop_nulls()):.4f}" in said
    frame["importance"] = None
    unweighted = write_movies(tmp_path / "unweighted.csv", frame)
    status, said = predict(trained_run, unweighted, tmp_path / "none.csv")
    assert status == 2 and "--ignore-label to score without labels and weights)" in said


def test_the_parts_of_the_own_data(trained_run, tmp_path, monkeypatch, log):
    monkeypatch.setattr(prediction, "_PIECE", 100)
    for part, rows in (("train", 432), ("validation", 108), ("test", 60)):
        found = scores(trained_run, ["@run"], tmp_path, "--part", part)
        assert len(found) == rows
    assert auc_of(found) == pytest.approx(summary_of(trained_run)["best_auc"], abs=1e-6)
    run_small(tmp_path, [])
    small = tmp_path / "small"
    found = scores(small, ["@run"], tmp_path).with_columns(weight=1.0)
    assert auc_of(found) == pytest.approx(summary_of(small)["best_auc"], abs=1e-6)
    # Synthetic clicks have no raw files.
    said = refused(main, tmp_path, small, log, tmp_path / "s.parquet")
    assert "write a prepared folder, or @run" in said


def test_a_row_left_out_does_not_move_others(trained_run, tmp_path, log):
    whole = scores(trained_run, [log], tmp_path)
    lines = log.read_text().splitlines()
    for row in (3, 20):
        lines[row + 1] = "5,too,few"
    (tmp_path / "bad.csv").write_text("\n".join(lines) + "\n")
    status, said = predict(trained_run, tmp_path / "bad.csv", tmp_path / "new.parquet")
    assert status == 2 and "bad.csv: line 5: found 3 columns" in said
    assert "(or --on-bad-row skip to leave such rows out, --on-bad-value missing to" in said
    assert not (tmp_path / "new.parquet").exists()
    found = scores(trained_run, [tmp_path / "bad.csv"], tmp_path, "--on-bad-row", "skip")
    kept = whole.filter(~pl.col("row").is_in([3, 20]))
    assert found.drop("file").equals(kept.drop("file"))
    aside = (tmp_path / "scores.bad_rows.jsonl").read_text().splitlines()
    assert ['"line": 5' in line for line in aside] == [True, False]


def test_what_is_said(trained_run, tmp_path, log):
    status, said = predict(trained_run, log, tmp_path / "s.parquet")
    assert status == 0
    assert "unseen ids" in said and "missing ids" in said
    for words in (f"{trained_run}, epoch 1", "60, ", f"{summary_of(trained_run)['best_auc']:.4f}"):
        assert words in said, said
    metadata = pl.read_parquet_metadata(tmp_path / "s.parquet")
    assert metadata["checkpoint"].endswith("epoch_0001") and metadata["epoch"] == "1"
    # All labels are 1 and all weights 0.
    write_movies(log, rows_of_test_part()[:5].assign(rating=5, importance=0))
    status, said = predict(trained_run, log, tmp_path / "t.parquet")
    assert status == 0 and said.count("undefined") == 3


def test_what_is_said_of_own_rows(trained_run, tmp_path):
    """The shares that preparation recorded, and metrics against pandas."""
    status, said = predict(trained_run, "@run", tmp_path / "s.csv", "--part", "validation")
    assert status == 0
    found = pd.read_csv(tmp_path / "s.csv")
    mean = np.average(found["score"], weights=found["weight"])
    calibration = mean / np.average(found["label"], weights=found["weight"])
    assert f"calibration  {calibration:.4f}, the mean score divided by" in said
    frame = movies(ROWS)[: round(0.9 * ROWS)]
    kept = round(0.8 * len(frame))
    known = frame["user"][:kept].value_counts()
    # Rare users have no row of their own.
    unseen = (frame["user"][kept:].map(known).fillna(0) < 2).mean()
    assert f"user {unseen:.1%}" in said, said


def test_missing_marks_among_several_ids(trained_run, packages, tmp_path):
    """`a|NA|b` is scored as `a|b`, in files and in the package alike."""
    frame = rows_of_test_part()[:3].reset_index(drop=True)
    plain = frame.assign(genres=["comedy|drama", "crime", ""])
    marked = frame.assign(genres=["comedy|NA|drama", "null|crime|-", "NaN|NA"])
    expected = scores(trained_run, [write_movies(tmp_path / "plain.csv", plain)], tmp_path)
    for form in ("csv", "parquet"):
        path = write_movies(tmp_path / f"marked.{form}", marked)
        found = scores(trained_run, [path], tmp_path)["score"]
        assert found.to_list() == expected["score"].to_list()
    columns = columns_of(marked.drop(columns=["rating", "importance"]))
    np.testing.assert_allclose(loaded(packages / "fp32").score(columns), found, atol=1e-7)


def test_bad_values_are_missing_on_request(trained_run, packages, tmp_path):
    """A bad value counts as missing, in files and in the package alike, and is told of."""
    types = {"user": str, "movie": str, "when": str, "slot": object, "age": object}
    bad = rows_of_test_part()[:12].reset_index(drop=True).astype(types)
    missing = bad.copy()
    for row, column, value in [
        (2, "slot", "ninety"), (3, "slot", 99), (4, "age", "old"), (5, "when", "yesterday"),
    ]:  # fmt: skip
        bad.loc[row, column], missing.loc[row, column] = value, None
    bad.to_csv(tmp_path / "bad.csv", index=False)
    missing.to_csv(tmp_path / "missing.csv", index=False)
    lenient = ["--on-bad-value", "missing"]
    status, said = predict(trained_run, tmp_path / "bad.csv", tmp_path / "s.parquet", *lenient)
    assert status == 0 and "treated as missing: age 1, slot 2, when 1" in said
    expected = scores(trained_run, [tmp_path / "missing.csv"], tmp_path, *lenient)["score"]
    found = pl.read_parquet(tmp_path / "s.parquet")["score"]
    assert len(found) == 12 and found.to_list() == expected.to_list()
    model = loaded(packages / "fp32")
    columns = columns_of(bad.drop(columns=["rating", "importance"]))
    np.testing.assert_allclose(model.score(columns, on_bad_value="missing"), found, atol=1e-7)
    assert model.bad_values == {"age": 1, "slot": 2, "when": 1}
    # A fraction is an id as good as a text.
    one = {name: values[:1] for name, values in columns.items()}
    found = model.score({**one, "genres": [[2.5, 3.0]]})
    np.testing.assert_array_equal(found, model.score({**one, "genres": [["2.5", "3"]]}))


def test_scoring_treats_denormal_numbers_as_zero(trained_run, tmp_path, monkeypatch):
    """Products of small weights would make it many times slower."""
    seen, logits = set(), CTRModel.logits

    def watched(*arguments, **named):
        seen.add(torch.full((), 1e-39).item())
        return logits(*arguments, **named)

    monkeypatch.setattr(CTRModel, "logits", watched)
    scores(trained_run, [write_movies(tmp_path / "log.csv", rows_of_test_part())], tmp_path)
    assert seen == {0.0}
