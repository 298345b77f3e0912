"""Training, scoring and reporting from Python."""

import json
import logging
import re
import warnings
from decimal import Decimal

import numpy as np
import pandas as pd
import polars as pl
import pyarrow
import pytest
import torch.distributed as dist

from stampede import DataError, RunFolderError, SettingsError, open_run, train
from stampede.engine import api
from stampede.engine.start_up import libraries_quiet
from stampede.engine.tables import read_field
from support.jobs import lines
from support.movie_runs import prepare_movies, rows_of_test_part, train_on_movies
from support.movies import write_movies
from support.predicting import scores
from support.ranks import run_ranks

SECTIONS = {
    "data": {"scale": 0.0005, "rows": 2000, "test_rows": 300},
    "model": {"hidden": [16, 16]},
    "train": {"batch_size": 256, "log_every": 2, "epochs": 1},
    "evaluate": {"compare_with_lr": False},
}


@pytest.fixture(scope="module")
def movie_run(tmp_path_factory):
    folder = prepare_movies(tmp_path_factory.mktemp("movies"))
    return open_run(train_on_movies(folder, "train.epochs=3", "optim.dense.lr=0.02", "run.seed=4"))


@pytest.mark.slow
def test_a_run_from_keywords_and_a_second_one(tmp_path, capsys):
    first = train(**SECTIONS, run={"dir": tmp_path, "seed": 3})
    printed = capsys.readouterr()
    assert first.path == tmp_path / "run"
    assert (
        "best AUC minus logloss on the validation part" in printed.out
        and "training:" in printed.err
    )
    # Nothing is replaced, and the same numbers come out in the same process.
    second = train({**SECTIONS, "run.dir": str(tmp_path)}, run={"seed": 3})
    assert second.path == tmp_path / "run-2"
    assert second.metrics == first.metrics
    summary = json.loads((first.path / "summary.json").read_text())
    assert first.metrics["validation"] == summary["validation"]
    assert first.metrics["test"]["auc"] == summary["auc"]
    assert repr(first).startswith(f"Run({str(first.path)!r}, epoch 1: validation AUC 0.")
    with pytest.raises(RunFolderError, match=r"run exists; write run\.overwrite=true"):
        train({**SECTIONS, "run": {"dir": tmp_path, "name": "run"}})
    assert not dist.is_initialized()


def ended_after_two(folder):
    """A run that ends after its second epoch, on each rank; what was called with."""
    called = []

    def after_epoch(metrics):
        called.append(metrics)
        return len(called) == 2

    given = {"epochs": 5, "batch_size": 256}
    run = train(
        data=SECTIONS["data"], model=SECTIONS["model"], train=given,
        evaluate=SECTIONS["evaluate"], sharding={"plan": "table_wise"},
        run={"dir": folder, "name": "ended", "quiet": True, "seed": 2}, after_epoch=after_epoch,
    )  # fmt: skip
    return called, list(run.history["validation_auc"]), run.metrics


@pytest.mark.wide
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_training_ends_after_the_epoch_that_is_told_so(tmp_path, ranks):
    found = [ended_after_two(tmp_path)] if ranks == 1 else run_ranks(2, ended_after_two, tmp_path)
    called, history, metrics = found[0]
    assert [one["validation"]["auc"] for one in called] == history and len(history) == 2
    assert metrics["validation"]["auc"] in history
    # Rank 0 decides for all.
    assert all(not others[0] and others[1:] == found[0][1:] for others in found[1:])


def test_a_configuration_from_a_file_with_other_values(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text("train: {batch_size: 512, epochs: 4}\noptim: {dense: {lr: 1e-3}}\n")
    config = api.configuration(path, train={"epochs": 2}, **{"optim.embedding.lr": 0.5})
    assert (config.run.name, config.train.batch_size, config.train.epochs) == ("job", 512, 2)
    assert (config.optim.dense.lr, config.optim.embedding.lr) == (1e-3, 0.5)
    assert api.configuration(str(path)).train.epochs == 4
    with pytest.raises(SettingsError, match=r"^configuration:\n  train\.epoch: .*did you.*epochs"):
        api.configuration(train={"epoch": 2})
    with pytest.raises(SettingsError, match=r"^data\.path: found a data frame, .*log\.parquet"):
        api.configuration(data={"path": pd.DataFrame()})
    with pytest.raises(SettingsError, match=r"data\.path: not for .*, or write another kind$"):
        api.configuration(data={"path": "log.csv"})


@pytest.mark.slow
def test_history_has_a_row_for_each_evaluation(movie_run):
    found = movie_run.history
    logged = lines(movie_run.path)
    tested = [line for line in logged if line.get("part") == "test"]
    assert found["epoch"].tolist() == [1, 2, 3]
    assert found["step"].tolist() == [line["step"] for line in tested]
    assert found["test_auc"].tolist() == [line["auc"] for line in tested]
    assert found["train_seconds"].is_monotonic_increasing
    losses = [line["loss"] for line in logged if line["kind"] == "train" and line["epoch"] == 2]
    assert found["train_loss"][1] == pytest.approx(np.mean(losses))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [pd.DataFrame, pl.DataFrame, "parquet", "globs"])
def test_scores_are_those_of_predict(movie_run, tmp_path, kind):
    frame = rows_of_test_part().reset_index(drop=True)
    path = write_movies(tmp_path / "log.csv", frame)
    expected = scores(movie_run.path, [path], tmp_path)["score"].to_numpy()
    if kind == "globs":
        data = [str(tmp_path / "lo?.csv")]
    elif isinstance(kind, str):
        data = write_movies(tmp_path / f"again.{kind}", frame)
    else:
        # Neither the label nor columns that are not used are needed.
        frame = frame.drop(columns=["rating", "importance"]).assign(further=1)
        data = frame if kind is pd.DataFrame else pl.from_pandas(frame)
    found = movie_run.score(data)
    assert found.dtype == np.float64 and found.shape == (len(frame),)
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_frames_that_do_not_fit(movie_run):
    frame = rows_of_test_part()
    with pytest.raises(DataError, match=r"^the frame: no column 'movie'; its columns are "):
        movie_run.score(frame.drop(columns="movie"))
    with pytest.raises(DataError, match=r"the frame: row 1, .*\(or on_bad_value=\"missing\" "):
        movie_run.score(frame.assign(slot=99))
    with pytest.warns(UserWarning, match=f"treated as missing: {len(frame)} of slot"):
        found = movie_run.score(frame.assign(slot=99), on_bad_value="missing")
    expected = movie_run.score(frame.assign(slot=pd.array([pd.NA] * len(frame), "Int64")))
    np.testing.assert_array_equal(found, expected)
    with pytest.raises(ValueError, match="found 'skip'; write 'error' or 'missing'"):
        movie_run.score(frame, on_bad_value="skip")
    with pytest.raises(DataError, match="found dict; pass a pandas, polars or Arrow frame"):
        movie_run.score({"user": [1]})


def frames_alike(frame):
    """The same rows in other types."""
    mixed = [int(user) if user % 2 else str(user) for user in frame["user"]]
    floats = [float(user) if user % 3 else user for user in frame["user"]]
    yield frame.assign(user=pd.Series(mixed, dtype=object))
    yield frame.assign(user=pd.Series(floats, dtype=object), slot=frame["slot"].astype("Int8"))
    yield frame.astype({"user": "category", "movie": "Float32", "city": "category"})
    yield frame.astype({"user": "string", "movie": str, "slot": object, "age": object})
    yield frame.convert_dtypes().astype({"movie": "category"})
    yield frame.astype({"user": "float64", "movie": "float32", "age": "Float64"})
    yield frame.assign(age=[None if age != age else Decimal(age) for age in frame["age"]])
    lists = [text.split("|") if text else None for text in frame["genres"]]
    yield frame.assign(genres=pd.Series(lists))
    yield frame.assign(genres=pd.Series([None if one is None else np.array(one) for one in lists]))
    yield pl.from_pandas(frame).cast({"movie": pl.Decimal(9, 2), "user": pl.UInt64})
    yield pl.from_pandas(frame).with_columns(pl.col("city").cast(pl.Categorical))
    objects = pl.Series("user", mixed, dtype=pl.Object)
    yield pl.from_pandas(frame).with_columns(objects)
    yield pyarrow.Table.from_pandas(frame.astype({"movie": "float64"}))


@pytest.mark.wide
def test_frames_of_other_types_give_the_same_scores(movie_run):
    frame = rows_of_test_part().reset_index(drop=True)
    frame = frame.drop(columns=["rating", "importance"])
    expected = movie_run.score(frame)
    for other in frames_alike(frame):
        assert movie_run.score(other).tolist() == expected.tolist()
    missing = movie_run.score(frame.assign(user=[None, *frame["user"][1:].map(str)]))
    for nothing in (np.nan, None, pd.NA):
        users = pd.Series([nothing, *frame["user"][1:]], dtype=object)
        for kind in (object, "category"):
            found = movie_run.score(frame.assign(user=users.astype(kind)))
            assert found.tolist() == missing.tolist()


@pytest.mark.parametrize(
    "value", [b"anna", {"a": 1}, 1j, pd.Period("2024-01"), [1, 2], pd.Interval(0, 1), object()]
)
def test_values_that_no_log_has_are_refused_with_their_column(movie_run, value):
    frame = rows_of_test_part().reset_index(drop=True)
    users = pd.Series([value, *frame["user"][1:]], dtype=object)
    with pytest.raises(DataError, match="the frame: column 'user'"):
        movie_run.score(frame.assign(user=users))
    if not isinstance(value, list):
        with pytest.raises(DataError, match=r"the frame: column 'user'|column user"):
            movie_run.score(frame.assign(user=pd.Series([value] * len(frame))))


def test_a_column_twice_is_refused(movie_run):
    frame = rows_of_test_part().reset_index(drop=True)
    twice = pd.concat([frame, frame[["user"]]], axis=1)
    with pytest.raises(DataError, match="the frame: has the column 'user' twice"):
        movie_run.score(twice)


def test_unseen_ids_far_above_the_validation_part_are_warned_of(movie_run, capsys):
    frame = rows_of_test_part().reset_index(drop=True)
    movie_run.score(frame)
    said = capsys.readouterr().err
    assert "missing ids: " in said and "unseen ids: " in said
    other = frame.assign(user=[f"user-{user}" for user in frame["user"]])
    with pytest.warns(UserWarning, match=r"field user: 100.0% of the ids are unseen, but only "):
        movie_run.score(other)
    said = capsys.readouterr().err
    assert "unseen ids: user 100.0% (" in said and "validation part of the training's data" in said


def test_embeddings_are_those_of_the_selected_epoch(movie_run):
    found = movie_run.embeddings("user")
    path = movie_run.path / f"checkpoints/epoch_{movie_run.summary['best_epoch']:04}"
    np.testing.assert_array_equal(found, read_field(path, "user").embedding)
    assert found.index[:2].tolist() == ["<missing>", "<rare or unseen>"]
    assert found.index.name == "user"
    assert set(found.index[2:]) <= {str(user) for user in range(60)}
    assert re.fullmatch(r"-inf to \S+", movie_run.embeddings("age_group").index[1])
    assert movie_run.embeddings("city").index.tolist() == list(range(8))
    with pytest.raises(RunFolderError, match="has no field 'users'; it has user"):
        movie_run.embeddings("users")


@pytest.mark.slow
def test_report_and_export(movie_run, tmp_path):
    assert movie_run.report() == movie_run.path / "report/report.html"
    page = movie_run.report(tmp_path / "there").read_text(encoding="utf-8")
    assert f"{movie_run.metrics['validation']['auc']:.4f}" in page
    package = movie_run.export(tmp_path / "model")
    assert (package / "load.py").is_file()


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(RunFolderError, match="there is no run"):
        open_run(tmp_path)
    (tmp_path / "config.yaml").write_text("")
    assert repr(open_run(tmp_path)).endswith("not finished)")
    with pytest.raises(RunFolderError, match="the run has not ended"):
        _ = open_run(str(tmp_path)).metrics
    (tmp_path / "metrics.jsonl").touch()
    assert list(open_run(tmp_path).history) == ["epoch", "step", "train_seconds", "train_loss"]


def test_the_libraries_are_quiet_for_a_while_only(monkeypatch, recwarn):
    ours, theirs = logging.getLogger("stampede.native_library"), logging.getLogger("torchrec.x")
    # The modules of the commands have made this process quiet.
    for name, level in {None: logging.WARNING, "torchrec": 0, "stampede": logging.DEBUG}.items():
        monkeypatch.setattr(logging.getLogger(name), "level", level)
    with libraries_quiet():
        warnings.warn("noise", stacklevel=1)
        assert not theirs.isEnabledFor(logging.WARNING)
        assert ours.isEnabledFor(logging.DEBUG)
    assert theirs.isEnabledFor(logging.WARNING) and ours.isEnabledFor(logging.DEBUG)
    assert not recwarn.list
