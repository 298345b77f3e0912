"""A run and its packages, which the tests of this folder share but do not change."""

import shutil

import numpy as np
import pytest

from stampede.engine.inference.packaging import export
from stampede.engine.inference.trained import open_trained
from support.movie_runs import prepare_movies, rows_of_test_part, train_on_movies
from support.movies import write_movies
from support.packages import columns_of
from support.predicting import scores


@pytest.fixture(autouse=True)
def _forgets_networks(registered):
    """In every test of this folder."""


@pytest.fixture(scope="package")
def trained_run(tmp_path_factory):
    folder = prepare_movies(tmp_path_factory.mktemp("movies"))
    # With this seed the best of the three epochs is the first, so that choosing it shows.
    return train_on_movies(folder, "train.epochs=3", "optim.dense.lr=0.02", "run.seed=4")


@pytest.fixture
def run(trained_run, tmp_path):
    """A copy of the run, to be changed."""
    return shutil.copytree(trained_run, tmp_path / "run")


@pytest.fixture
def log(tmp_path):
    """The rows of the test part as a file."""
    return write_movies(tmp_path / "log.csv", rows_of_test_part())


@pytest.fixture(scope="package")
def packages(trained_run, tmp_path_factory):
    """The folder of the run's package by type of rows."""
    folder = tmp_path_factory.mktemp("packages")
    for kind in ("fp32", "fp16", "int8"):
        export(open_trained(trained_run), folder / kind, kind, overwrite=False)
    return folder


@pytest.fixture(scope="package")
def trainers(trained_run, tmp_path_factory):
    """Columns of the test part, with some values that are new, and the trainer's logits."""
    folder = tmp_path_factory.mktemp("trainers")
    frame = rows_of_test_part().reset_index(drop=True).drop(columns=["rating", "importance"])
    frame = frame.astype({"user": str, "movie": str})
    frame.loc[3, ["user", "genres", "city"]] = ["never seen", "", ""]
    frame.loc[4, "genres"] = "war|western|drama"
    path = write_movies(folder / "log.csv", frame)
    score = scores(trained_run, [path], folder)["score"].to_numpy()
    return columns_of(frame.assign(when=frame["when"].astype(str))), np.log(score / (1 - score))
