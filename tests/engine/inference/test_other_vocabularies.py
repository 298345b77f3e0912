"""Scores are made with the vocabularies that the checkpoint was trained with, and no others."""

import re
import shutil

import pytest

from stampede.data.apply import apply_learned
from stampede.data.options import WritingOptions
from stampede.engine.export import main as export
from support.checkpoints import as_first_format
from support.movie_runs import prepare_movies, rows_of_test_part, train_on_movies
from support.movies import write_movies
from support.predicting import predict, run_command, scores
from support.tampering import sign_learned, swap_users


@pytest.fixture
def run(trained_run, tmp_path):
    return shutil.copytree(trained_run, tmp_path / "run")


@pytest.fixture
def log(tmp_path):
    return write_movies(tmp_path / "new.csv", rows_of_test_part())


def test_what_a_run_kept_is_compared_with_its_checkpoint(run, log, tmp_path):
    apply_learned(run / "inputs", str(log), WritingOptions(), tmp_path / "prepared")
    expected = scores(run, [log], tmp_path)
    swap_users(run / "inputs")
    out, package = tmp_path / "s.parquet", tmp_path / "package"
    for status, said in (
        predict(run, log, out),
        predict(run, tmp_path / "prepared", out),
        run_command(export, run, package),
    ):
        assert status == 2 and re.search(
            r"inputs: these are not the vocabularies that .*epoch_0001 was trained with", said
        )
        assert said.count("\n") == 1
        assert f"delete {run}/inputs to use the run's prepared data" in said
    assert not out.exists() and not package.exists()
    shutil.rmtree(run / "inputs")
    assert scores(run, [log], tmp_path).equals(expected)


def test_own_data_are_compared_with_the_checkpoint(tmp_path):
    run = train_on_movies(prepare_movies(tmp_path))
    (data,) = (tmp_path / "cache").iterdir()
    swap_users(data)
    sign_learned(data)
    status, said = predict(run, "@run", tmp_path / "s.parquet")
    assert status == 2 and f"{data}: these are not the vocabularies that " in said
    assert "score raw files, or prepare them with `stampede apply`" in said
    log = write_movies(tmp_path / "new.csv", rows_of_test_part())
    assert predict(run, log, tmp_path / "s.parquet")[0] == 0


def test_a_checkpoint_of_the_first_format_has_no_fingerprint(run, log, tmp_path):
    inputs = ([log], ["@run"])
    expected = [scores(run, given, tmp_path) for given in inputs]
    as_first_format(run / "checkpoints/epoch_0001")
    for given, before in zip(inputs, expected, strict=True):
        assert scores(run, given, tmp_path).equals(before)
    assert run_command(export, run, tmp_path / "package")[0] == 0
