"""Scores are made with the vocabularies that the checkpoint was trained with, and no others."""

import shutil

from stampede.data.apply import apply_learned
from stampede.data.options import WritingOptions
from stampede.engine import export, predict
from support.movie_runs import prepare_movies, train_on_movies
from support.predicting import refused, scores
from support.tampering import sign_learned, swap_users


def test_what_a_run_kept_is_compared_with_its_checkpoint(run, log, tmp_path):
    apply_learned(run / "inputs", str(log), WritingOptions(), tmp_path / "prepared")
    expected = scores(run, [log], tmp_path)
    swap_users(run / "inputs")
    for main, arguments in (
        (predict.main, [log, tmp_path / "s.parquet"]),
        (export.main, [tmp_path / "package"]),
    ):
        said = refused(main, tmp_path, run, *arguments)
        assert "inputs: these are not the vocabularies that " in said
        assert "epoch_0001 was trained with" in said and said.count("\n") == 1
        assert f"delete {run}/inputs to use the run's prepared data" in said
    # A prepared folder has vocabularies of its own.
    assert scores(run, [tmp_path / "prepared"], tmp_path).equals(expected.drop("file"))
    shutil.rmtree(run / "inputs")
    assert scores(run, [log], tmp_path).equals(expected)


def test_prepared_data_are_compared_with_the_checkpoint(tmp_path):
    run, log = train_on_movies(prepare_movies(tmp_path)), tmp_path / "log.csv"
    (data,) = (tmp_path / "cache").iterdir()
    swap_users(data)
    sign_learned(data)
    for given in ("@run", data):
        said = refused(predict.main, tmp_path, run, given, tmp_path / "s.parquet")
        assert f"{data}: these are not the vocabularies that " in said
        assert "score raw files, or prepare them with `stampede apply`" in said
    assert len(scores(run, [log], tmp_path))
    shutil.rmtree(run / "inputs")
    shutil.rmtree(tmp_path / "cache")
    said = refused(predict.main, tmp_path, run, log, tmp_path / "s.parquet")
    assert "the run kept no vocabularies" in said and "not prepared yet" in said
